"""Ranks in pods, which are processes of this host, and the progress that Kubeflow receives."""

import http.server
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import yaml
from start_jobs import BARE, HANG_SECONDS, launcher

from keras_dist import errors
from keras_dist.kubernetes.__main__ import _exit_code, _first_failure, main
from keras_dist.launch.interactive.outcome import Failure

JOBS = Path(__file__).parents[3] / "examples" / "jobs"
COMMAND = [sys.executable, "-m", "keras_dist.kubernetes"]

pytestmark = pytest.mark.skipif(len(launcher()) > 1, reason="needs MPICH")

SCRIPT = """
import os, sys, time
import numpy as np
import keras_dist
keras_dist.init()
rank = keras_dist.rank()
total = keras_dist.allreduce(np.full(3, rank + 1.0), op=keras_dist.Sum)
print(f"{rank} {keras_dist.size()} {total.tolist()} {sys.argv[1:]}\\n", end="", flush=True)
"""


@pytest.fixture
def start(tmp_path, free_port):
    """A function that starts the pods of a job, each with a number of ranks."""
    (tmp_path / "token").write_text("secret\n")
    started = []

    def run(text, pods, of=2, ranks=1, timeout=HANG_SECONDS):
        (tmp_path / "train.py").write_text(BARE + SCRIPT + text)
        told = {"PET_NNODES": of, "PET_NPROC_PER_NODE": ranks, "PET_MASTER_PORT": free_port}
        variables = {name: str(value) for name, value in told.items()}
        variables |= {"PET_MASTER_ADDR": "127.0.0.1", "KERAS_BACKEND": "torch"}
        options = ["--token-file", tmp_path / "token", "--start-timeout", str(timeout)]
        for pod in pods:
            started.append(
                subprocess.Popen(
                    [*COMMAND, *options, tmp_path / "train.py", "--epochs", "3"],
                    env={**os.environ, **variables, "PET_NODE_RANK": str(pod)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return started

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ends(pods):
    outputs = [pod.communicate(timeout=HANG_SECONDS)[0] for pod in pods]
    return [pod.returncode for pod in pods], outputs


def printed_by(pod, expected):
    """Waits until a pod prints a line."""
    lines = []
    for line in pod.stdout:
        lines.append(line)
        if expected in line:
            return
    pytest.fail(f"a pod ended without {expected!r}:\n{''.join(lines)}")


def test_pods_become_ranks(start):
    codes, outputs = ends(start("sys.exit(0)", [1, 0], ranks=2))
    assert codes == [0, 0], outputs
    total = [1.0 + 2 + 3 + 4] * 3
    for pod, output in zip([1, 0], outputs, strict=True):
        for rank in (2 * pod, 2 * pod + 1):
            assert f"{rank} 4 {total} ['--epochs', '3']\n" in output


def test_a_lost_rank_ends_all_pods(start):
    text = "if rank == 1: raise ValueError('broken')\nkeras_dist.barrier()"
    codes, outputs = ends(start(text, [0, 1]))
    assert 0 not in codes and "rank 1 of 2" in outputs[0], outputs


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        # On a busy machine the rank of the first pod comes late as well.
        (0, r"\[rank (0, )?1 of 2\] Expected to join within 2 s"),
        (1, "the first pod to answer at 127.0.0.1"),
    ],
)
def test_a_pod_that_never_comes_is_named(start, pod, expected):
    [code], [output] = ends(start("", [pod], timeout=2))
    assert code == 1 and re.search(expected, output), output


def test_termination_reaches_the_ranks(start):
    text = """
import signal
told = []
signal.signal(signal.SIGTERM, lambda *given: told.append(given))
print("ready", flush=True)
while not told: time.sleep(0.1)
keras_dist.barrier()
sys.exit(75)
"""
    pods = start(text, [0, 1])
    for pod in pods:
        printed_by(pod, "ready")
    for pod in pods:
        pod.send_signal(signal.SIGTERM)
    codes, outputs = ends(pods)
    assert codes == [75, 75], outputs


WAITING = """
import os, signal, subprocess, sys
from keras_dist.kubernetes.__main__ import _forward_termination, _retried

started = _forward_termination()
if sys.argv[1] == "started":
    started.set()
    os.kill(os.getpid(), signal.SIGTERM)
    rank = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGTERM).name)"]
    sys.exit(subprocess.run(rank).returncode)

def attempt():
    os.kill(os.getpid(), signal.SIGTERM)
    raise OSError

_retried(attempt, "the first pod to answer", 60)
"""


@pytest.mark.parametrize(
    "ranks, code, printed", [("waiting", 143, ""), ("started", 0, "SIG_DFL\n")]
)
def test_termination_while_ranks_start(ranks, code, printed):
    command = [sys.executable, "-c", WAITING, ranks]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr


@pytest.mark.parametrize(
    "codes, code", [([0, 0], 0), ([0, -1], 255), ([256, 0], 1), ([0, 75, 1], 75)]
)
def test_the_exit_code_is_the_first_other_than_0(codes, code):
    assert _first_failure(codes) == code


def test_an_error_that_cannot_be_unpickled_is_printed(capsys):
    assert _exit_code(Failure("SomeError: broken", "", b"no pickle", False)) == 1
    assert "SomeError: broken" in capsys.readouterr().err


def test_a_variable_that_is_missing_is_named(tmp_path):
    (tmp_path / "token").write_text("secret")
    ended = subprocess.run(
        [*COMMAND, "--token-file", tmp_path / "token", "train.py"],
        env={**os.environ, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1 and "PET_NPROC_PER_NODE with a number" in ended.stderr


def documents(name):
    return list(yaml.safe_load_all((JOBS / name).read_text()))


def test_jobs_have_the_fields_of_the_published_interfaces():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="a package of the tests")
    kinds = {
        "Job": models.IoK8sApiBatchV1Job,
        "Service": models.IoK8sApiCoreV1Service,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    found = documents("trainjob.yaml") + documents("indexed_job.yaml")
    assert {each["kind"] for each in found} == set(kinds)
    for each in found:  # a field that there is not gets lost
        assert kinds[each["kind"]].from_dict(each).to_dict() == each
    wrong = {**found[1], "spec": {**found[1]["spec"], "trainers": {}}}
    assert models.TrainerV1alpha1TrainJob.from_dict(wrong).to_dict() != wrong


def test_jobs_agree_with_themselves():
    runtime, job = documents("trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    service, indexed = documents("indexed_job.yaml")
    pod = indexed["spec"]["template"]["spec"]
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    name = indexed["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert variables["PET_MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert int(variables["PET_NNODES"]) == indexed["spec"]["completions"]
    assert indexed["spec"]["completions"] == indexed["spec"]["parallelism"]


@pytest.fixture
def status_server(tmp_path, monkeypatch):
    """A server with TLS, as that of Kubeflow Trainer; gives the requests that it gets."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl, which makes a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost".split()
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run([*command, *names], check=True, capture_output=True)
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.headers["Authorization"], json.loads(body)["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("first\n")
    url = f"https://localhost:{server.server_port}/status"
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield requests
    server.shutdown()
    server.server_close()


@pytest.fixture
def callback(monkeypatch):
    from keras_dist import runtime
    from keras_dist.kubernetes import ProgressCallback, train_job

    monkeypatch.setattr(runtime, "rank", lambda: 0)
    monkeypatch.setattr(train_job, "PAUSE_SECONDS", 0.0)
    made = ProgressCallback()
    made.set_params({"epochs": 4, "steps": 2})
    return made


def test_progress_is_posted(status_server, callback, tmp_path):
    callback.on_train_begin()
    callback.on_epoch_begin(2)  # resumed
    callback.on_train_batch_end(0)
    callback._finish_request()
    (tmp_path / "token").write_text("second\n")
    callback.on_epoch_end(2, {"loss": 0.5, "matrix": [1, 2]})
    callback.on_train_end({"loss": 0.25})
    [(_, begun), (token, middle), (_, end)] = status_server
    assert begun["progressPercentage"] == 62 and begun["metrics"] == []
    assert token == "Bearer second" and middle["progressPercentage"] == 75
    assert middle["metrics"] == [{"name": "loss", "value": "0.5"}]
    assert end["progressPercentage"] == 100 and end["estimatedRemainingSeconds"] == 0
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="a package of the tests")
    for _, status in status_server:
        assert models.TrainerV1alpha1TrainerStatus.from_dict(status).metrics is not None


def test_posts_within_the_next_epoch_have_the_metrics_of_the_last(
    status_server, callback, monkeypatch
):
    from keras_dist.kubernetes import train_job

    now = 100.0
    monkeypatch.setattr(train_job, "PAUSE_SECONDS", 5.0)
    monkeypatch.setattr(train_job, "time", types.SimpleNamespace(monotonic=lambda: now))
    callback.on_train_begin()
    for epoch in range(3):
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            now += 4.0
            callback.on_train_batch_end(batch)
            callback._finish_request()
        callback.on_epoch_end(epoch, {"loss": 1.0 + epoch})  # within the pause
    posted = [[each["value"] for each in status["metrics"]] for _, status in status_server]
    assert posted == [[], ["1"], ["2"]]


def test_a_server_that_does_not_answer_is_logged_once(status_server, callback, monkeypatch, caplog):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", "missing")
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_epoch_end(0, {"loss": 0.5})
    callback.on_train_end({})
    assert len(caplog.records) == 1 and "could not be posted" in caplog.text
    assert status_server == []


@pytest.mark.parametrize(("content", "received"), [(None, "No such file"), (b" \n", "is empty")])
def test_a_pod_without_its_secret_says_so(tmp_path, monkeypatch, content, received):
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_PORT"):
        monkeypatch.setenv(f"PET_{name}", "1")
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(sys, "argv", ["", "--token-file", str(tmp_path / "token"), "train.py"])
    with pytest.raises(errors.LaunchError, match=f"secret of the job. Received: .*{received}"):
        main()
