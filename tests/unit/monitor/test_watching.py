"""Watching a job: the state of a rank, its display, server and discovery."""

import contextlib
import dataclasses
import http.client
import json
import math
import os
import re
import socket
import stat
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from start_jobs import wait_for

from keras_dist import errors
from keras_dist.launch.cli import main, top
from keras_dist.monitor import gpu, prometheus, server
from keras_dist.monitor.endpoints import serving_at_socket
from keras_dist.monitor.report import Job, Report
from keras_dist.monitor.server import Server
from keras_dist.monitor.sockets import directory, find_sockets, jobs_of, remove_dead, token_in


def test_a_report_is_a_line_of_json_that_any_reader_takes():
    device = gpu.Gpu("H200", 0.5, 10, 100)
    report = Report(1, "node", 7, 1.5, "fit", step=3, logs={"loss": math.nan, "a": 0.5}, gpu=device)
    line = json.dumps(report.to_fields())
    assert json.loads(line, parse_constant=None)["logs"] == {"loss": "nan", "a": 0.5}
    assert "NaN" not in line and "\n" not in line
    again = Report.from_fields(json.loads(line))
    assert math.isnan(again.logs.pop("loss"))
    assert again.gpu == device and again.step == 3 and again.logs == {"a": 0.5}
    # Sent by a later version.
    assert Report.from_fields({**json.loads(line), "new": 1}).rank == 1


# --- The server, and strangers


def a_job():
    return Job("train.py", "node", 7, 0.0, 1.0, [])


@contextlib.contextmanager
def crowd(port, number):
    """Connects silent clients; yields them once each is accepted or rejected, with the threads."""
    before = set(threading.enumerate())  # a thread of an earlier test may still end

    def serving():
        return len(set(threading.enumerate()) - before)

    with contextlib.ExitStack() as sockets:
        made = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(number)]
        for one in made:
            sockets.enter_context(one)
        wait_for(lambda: serving() == min(number, 16))
        yield made, serving()
    wait_for(lambda: serving() == 0)


def test_a_stranger_at_the_port_sees_no_job(endpoint, free_port):
    address = ("127.0.0.1", free_port)
    assert next(jobs_of(address, TOKEN)).name == "train.py"
    for token in ("", "no token"):
        with pytest.raises(errors.ArgumentError, match="the token is not that of this job"):
            next(jobs_of(address, token))


def test_the_user_of_a_job_needs_no_token(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with serving_at_socket(lambda: [a_job()]) as path:
        assert path in find_sockets()
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert next(jobs_of(path)).name == "train.py"
        job = jobs_of(path)
        next(job)
    assert path not in find_sockets()
    with pytest.raises(FileNotFoundError):  # the job has ended
        next(job)


def test_the_socket_of_another_node_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = directory()
    node = os.uname().nodename
    for name in (f"{node}-1.socket", f"{node}-2-1.socket"):  # the directory may be shared
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / name))
    remove_dead()
    assert [path.name for path in folder.iterdir()] == [f"{node}-2-1.socket"]


def test_a_file_that_holds_no_token_is_named(tmp_path, capsys):
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    words = ["top", "--address", "127.0.0.1:1", "--token-file", str(tmp_path / "token")]
    assert main(words) == 2
    assert "Expected --token-file to be the token file" in capsys.readouterr().err


TOKEN = "a token that nobody guesses"


@pytest.fixture
def endpoint(free_port):
    made = Server(lambda: [a_job()], ("127.0.0.1", free_port), TOKEN)
    yield f"http://127.0.0.1:{free_port}"
    made.close()


def get(url, **headers):
    """Returns status, headers and body of an answer."""
    try:
        asked = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status, str(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, str(error.headers), error.read().decode()


def test_figures_of_jobs_with_one_name_are_series_of_their_own():
    jobs = [
        dataclasses.replace(a_job(), pid=pid, started=started) for pid, started in [(8, 2), (7, 1)]
    ]
    lines = [line for line in prometheus.to_text(jobs).decode().splitlines() if line[0] != "#"]
    series = [line.rpartition(" ")[0] for line in lines]
    assert len(set(series)) == len(series)
    assert [name for name in series if name.startswith("keras_dist_ranks")] == [
        'keras_dist_ranks{job_name="train.py",pid="8"}',
        'keras_dist_ranks{job_name="train.py",pid="7"}',
    ]


def test_one_port_has_the_page_the_job_and_its_figures_to_read(endpoint):
    token = urllib.parse.quote(TOKEN)
    status, said, page = get(f"{endpoint}/?token={token}")
    assert status == 200 and "<title>keras-dist top</title>" in page
    assert "Content-Security-Policy: default-src 'none'" in said
    status, said, line = get(f"{endpoint}/job?token={token}")
    assert status == 200 and "no-store" in said and json.loads(line)["job"] == "train.py"
    # Prometheus brings a token in a header or a parameter.
    header = {"Authorization": f"Bearer {TOKEN}"}
    for query, headers in [
        ("", header),
        ("", {"Authorization": f"bearer  {TOKEN} "}),
        (f"?token={token}", {}),
    ]:
        status, _, body = get(f"{endpoint}/metrics{query}", **headers)
        assert status == 200 and 'keras_dist_ranks{job_name="train.py",pid="' in body
    assert get(f"{endpoint}/other?token={token}")[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        asked = urllib.request.Request(f"{endpoint}/job", method=method, headers=header)
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(asked, timeout=20)


@pytest.mark.parametrize(
    ("query", "authorization"),
    [
        ("", None),
        ("?token=", ""),
        ("?token=%ff%00", "Bearer"),
        (f"?token={'x' * 60_000}", "Bearer \xe9"),
        ("", f"Bearer {TOKEN[:-1]}"),
        ("", f"Bearer {TOKEN}x"),
        ("", f"Basic {TOKEN}"),
    ],
)
def test_a_stranger_learns_nothing(endpoint, query, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    for path in ("/metrics", "/job", "/", "/other"):
        status, said, body = get(endpoint + path + query, **headers)
        assert (status, body) == (401, "A token is required.\n")
        assert "WWW-Authenticate: Bearer" in said and "Server: HTTP\n" in said
        assert not [word for word in ("keras", "Python", "train", "node") if word in said + body]


def test_a_request_that_comes_byte_by_byte_is_broken_off(endpoint, free_port, monkeypatch):
    assert server.REQUEST_SECONDS == 10
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    address = ("127.0.0.1", free_port)
    with (
        socket.create_connection(address, 20) as slow,
        pytest.raises(OSError, match=r"Broken pipe|reset by peer"),
    ):
        for _ in range(600):  # for a minute, unless it is interrupted
            slow.sendall(b"x")
            time.sleep(0.1)


class WatchedOnce:
    """A job that ends once its page has been asked for."""

    def __init__(self, ask):
        self.ask = ask

    def jobs(self):
        return [a_job()]

    def live(self):
        self.ask()
        return False


def test_the_page_of_top_is_on_the_loopback_interface_and_has_its_own_token(free_port, capsys):
    urls = []

    def ask():
        url = re.search(r"http\S+", capsys.readouterr().out)[0]
        urls.append(url)
        assert get(url)[0] == 200 and get(url.partition("?")[0])[0] == 401
        with pytest.raises(ConnectionRefusedError):  # at all interfaces it would be accepted
            socket.create_connection(("127.0.0.2", free_port), 20)

    for _ in range(2):
        top._serve(WatchedOnce(ask), free_port)
    assert len(set(urls)) == 2 and all(len(url.partition("token=")[2]) > 40 for url in urls)


def test_the_token_is_made_once_and_is_its_users_alone(tmp_path):
    path = tmp_path / "token"
    token = token_in(path)
    assert len(token) > 40 and token_in(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("x" * 40, 0o640, "only this user can read.*one of user .*, mode -rw-r-----"),
        ("short", 0o600, "a token of at least 16 ASCII characters"),
        ("", 0o600, "a token of at least 16 ASCII characters"),
    ],
)
def test_a_file_that_others_can_read_or_guess_is_refused(tmp_path, text, mode, message):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(errors.LaunchError, match=message):
        token_in(path)


def test_a_link_in_place_of_a_token_is_refused(tmp_path):
    (tmp_path / "other").write_text("x" * 40)
    (tmp_path / "token").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="token"):
        token_in(tmp_path / "token")


def test_a_token_of_another_user_is_refused(tmp_path):
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: files of another user; only root can make them")
    token_in(tmp_path / "token")
    os.chown(tmp_path / "token", 54321, 54321)
    with pytest.raises(errors.LaunchError, match="one of user uid 54321"):
        token_in(tmp_path / "token")


def test_requests_over_http_are_so_many_and_no_more(endpoint, free_port):
    with crowd(free_port, 20) as (strangers, threads):
        assert threads == 16
        assert [one.recv(1) for one in strangers[16:]] == [b""] * 4
    assert "keras_dist_ranks" in get(f"{endpoint}/metrics", Authorization=f"Bearer {TOKEN}")[2]


def test_what_a_request_raises_is_logged_and_a_connection_that_ends_is_not(free_port, caplog):
    def failing():
        raise KeyError("no such figure")

    endpoint = Server(failing, ("127.0.0.1", free_port), TOKEN)
    try:
        with contextlib.suppress(OSError, http.client.HTTPException):
            get(f"http://127.0.0.1:{free_port}/metrics", Authorization=f"Bearer {TOKEN}")
    finally:
        endpoint.close()
    assert "A request of 127.0.0.1 failed." in caplog.text and "no such figure" in caplog.text
    caplog.clear()
    for error in BrokenPipeError, ConnectionResetError:
        try:
            raise error
        except OSError:
            endpoint.handle_error(None, ("127.0.0.1", 1))
    assert not caplog.records
