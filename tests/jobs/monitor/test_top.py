"""`keras-dist top` and other ways to watch running jobs."""

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from start_jobs import BARE, HANG_SECONDS, SCRIPTS, launcher, lean, script

from keras_dist.monitor.report import Job

CHROMIUM = shutil.which("chromium")
COMMAND = [sys.executable, "-m", "keras_dist.launch.cli", "top"]

# Rank 1 is slow, and the others wait for it.
LOOP = """
import os, pathlib, sys, time
from keras_dist import ops
runtime.init()
rank, folder = runtime.rank(), pathlib.Path(sys.argv[1])
(folder / f"rank-{rank}").write_text(str(os.getpid()))
while ops.broadcast_object(not (folder / "end").exists()):
    time.sleep(0.05 * rank)
"""


@pytest.fixture
def runtime_directory(monkeypatch):
    """A directory for the sockets of this test, with a short path."""
    with tempfile.TemporaryDirectory(prefix="top-") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture
def begin(runtime_directory, tmp_path):
    """A function that starts a job; returns the job, its folder and its output."""
    with contextlib.ExitStack() as jobs:

        def begin(name, command, **variables):
            folder = tmp_path / name
            folder.mkdir()
            with open(folder / "printed", "wb") as printed:
                job = subprocess.Popen(
                    [*command, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    env=lean(**variables),
                )
            jobs.callback(job.wait)
            jobs.callback(job.kill)
            return job, folder

        yield begin


def ranks(number, text):
    return [*launcher(), "-n", str(number), *script(text)]


def top(*options):
    """Runs `keras-dist top`."""
    return subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=HANG_SECONDS
    )


def seen(*options):
    """Returns the jobs that `keras-dist top` finds, by process id of rank 0."""
    jobs = map(Job.from_json, top("--once", "--json", *options).stdout.splitlines())
    return {job.pid: job for job in jobs}


def pids(folder, number):
    """Returns the processes of the ranks of a job once all have started."""
    paths = [folder / f"rank-{rank}" for rank in range(number)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths), folder)
    return [int(path.read_text()) for path in paths]


def wait_until(what, folder):
    """Waits for a true value and returns it; shows the output of the job after a timeout."""
    end = time.monotonic() + HANG_SECONDS
    while not (found := what()):
        printed = (folder / "printed").read_text()
        assert time.monotonic() < end and "Error" not in printed, printed
        time.sleep(0.1)
    return found


def get(url, **headers):
    asked = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(asked, timeout=HANG_SECONDS) as answer:
        return answer.read().decode(), answer.headers


def samples(text):
    """Returns the samples of Prometheus' text format by name and rank."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter")
        for sample in family.samples:
            key = sample.name, sample.labels.get("rank")
            assert key not in found or "metric" in sample.labels
            found[key] = sample.value
    return found


def test_jobs_are_watched_until_they_end_or_are_killed(begin, runtime_directory, free_port):
    with socket.create_server(("127.0.0.1", 0)) as made:
        metrics, port = made.getsockname()[1], free_port
    ports = {"KERAS_DIST_PROMETHEUS_PORT": str(metrics), "KERAS_DIST_TOP_PORT": str(port)}
    pair, folder = begin("pair", ranks(2, LOOP), **ports)
    root, second = pids(folder, 2)
    single, other = begin("single", script(LOOP), **ports)  # its ports are in use
    (alone,) = pids(other, 1)

    # Both jobs, with waits. A rank that started first also waited for the other.
    def slow():
        found = seen()
        return found[root].slowest == 1 and found

    jobs = wait_until(slow, folder)
    assert [report.pid for report in jobs[root].rows] == [root, second]
    assert jobs[alone].slowest is None
    first, last = (report.waiting for report in jobs[root].rows)
    assert first > last
    assert all(each.memory_nbytes > 2**20 and each.age < 60 for each in jobs[root].rows)
    drawn = top("--once", str(root)).stdout
    assert "2 ranks on 1 node" in drawn and "slowest: rank 1" in drawn and "waiting" in drawn

    # The files are private to the user.
    directory = runtime_directory / "keras_dist"
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {".socket": 0o600, "": 0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700

    # Only by the port and with its token; the second job has no port.
    address = ("--address", f"127.0.0.1:{port}", "--token-file")
    token = directory / "prometheus-token"
    assert set(seen(*address, str(token))) == {root}
    wrong = folder / "wrong"
    wrong.write_text("x" * 43)
    refused = top(*address, str(wrong))
    assert refused.returncode == 2 and "the token is not that of this job" in refused.stderr
    said = (other / "printed").read_text()
    assert f"KERAS_DIST_TOP_PORT={port} cannot be used" in said
    assert f"KERAS_DIST_PROMETHEUS_PORT=127.0.0.1:{metrics} cannot be used" in said
    assert said.count("Training continues.") == 2

    # Prometheus, with a fixed token.
    kept = token
    url = f"http://127.0.0.1:{metrics}/metrics"
    opened = f"keras_dist: Prometheus can scrape {url} with the token in {kept}.\n"
    assert opened in (folder / "printed").read_text()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(url)
    text, headers = get(url, Authorization=f"Bearer {kept.read_text().strip()}")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(text)
    assert found["keras_dist_ranks", None] == 2
    assert found["keras_dist_waited_seconds_total", "0"] > 0
    assert found["keras_dist_memory_bytes", "1"] > 2**20

    # A rank that does not answer is shown with its last state.
    os.kill(second, signal.SIGSTOP)

    def silent():
        ages = [row.age for row in seen()[root].rows]
        return ages[0] < 1 < ages[1]

    wait_until(silent, folder)
    os.kill(second, signal.SIGCONT)

    # A killed rank 0 leaves nothing that disturbs the next job.
    os.kill(root, signal.SIGKILL)
    pair.wait()
    jobs = seen()
    assert root not in jobs and alone in jobs
    (other / "end").touch()
    assert single.wait(120) == 0
    gone = top("--once", str(alone))
    assert gone.returncode == 1 and f"No job with process {alone} runs on" in gone.stderr
    assert list(directory.iterdir()) == [kept]


def test_a_fit_is_watched(begin):
    job, folder = begin("fit", [*launcher(), "-n", "2", sys.executable, SCRIPTS / "watched_fit.py"])

    (root, _) = pids(folder, 2)

    def speeds():
        found = seen(str(root)).get(root)
        return found is not None and found.samples_per_second and found

    found = wait_until(speeds, folder)
    for report in found.rows:
        assert (report.state, report.epochs, report.steps) == ("fit", 500, 8)
        assert 1 <= report.epoch <= 500 and 0 <= report.step <= 8
        assert report.logs["loss"] > 0
        assert report.samples_per_second == pytest.approx(8 * report.steps_per_second)
    time.sleep(1)
    (folder / "end").touch()
    assert job.wait(HANG_SECONDS) == 0, (folder / "printed").read_text()
    written = set((folder / "tags").read_text().split("|"))
    expected = {f"{name}/rank {rank}" for name in ("waiting", "memory_gib") for rank in range(2)}
    assert expected | {"loss", "samples_per_second", "steps_per_second/rank 1"} <= written


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_shows_a_job_in_a_browser(begin, tmp_path):
    named = tmp_path / "<b>.py"
    named.write_text(BARE + LOOP)
    job, folder = begin("job", [sys.executable, str(named)])
    (root,) = pids(folder, 1)
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    browser += ["--no-first-run", "--disable-background-networking", "--disable-sync"]
    browser += ["--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}"]
    with subprocess.Popen(
        [*COMMAND, str(root), "--web"], stdout=subprocess.PIPE, text=True
    ) as page:
        url = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=\S{43}", page.stdout.readline())
        for path in ("", "job?token=x", "job"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(url[0].partition("?")[0] + path)
        taken = top(str(root), "--web", "--port", url[1])
        assert taken.returncode == 2 and "a free port for the page" in taken.stderr
        look = [*browser, "--virtual-time-budget=3000", "--dump-dom", url[0]]
        dom = subprocess.run(look, capture_output=True, text=True, timeout=HANG_SECONDS).stdout
        (folder / "end").touch()
        assert (job.wait(HANG_SECONDS), page.wait(HANG_SECONDS)) == (0, 0)
    assert "<h1>&lt;b&gt;.py</h1>" in dom and f"process {root} on" in dom
    rows = re.findall(r"<tr.*?</tr>", dom)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", rows[-1])
    assert len(rows) == 2 and cells[:2] == ["0", os.uname().nodename] and "GiB" in cells[-1]
    assert "<path d=" in dom and "src=" not in dom and "href=" not in dom
