"""Watching a job: what a rank says of itself, how it is drawn, served and found."""

import contextlib
import json
import math
import socket
import threading
import time
import urllib.request

import pytest

from keras_dist.watching import gpu
from keras_dist.watching.job import Job
from keras_dist.watching.prometheus import Endpoint
from keras_dist.watching.publish import publish_at_port
from keras_dist.watching.report import Report
from keras_dist.watching.sockets import jobs_at


def test_a_report_is_a_line_of_json_that_any_reader_takes():
    device = gpu.Gpu("H200", 0.5, 10, 100)
    report = Report(1, "node", 7, 1.5, "fit", step=3, logs={"loss": math.nan, "a": 0.5}, gpu=device)
    line = report.to_json()
    assert json.loads(line, parse_constant=None)["logs"] == {"loss": "nan", "a": 0.5}
    assert "NaN" not in line and "\n" not in line
    again = Report.from_json(line)
    assert math.isnan(again.logs.pop("loss"))
    assert again.gpu == device and again.step == 3 and again.logs == {"a": 0.5}
    # One that a later version has sent.
    assert Report.from_json(line[:-1] + ', "new": 1}').rank == 1


def test_gpus_are_those_that_cuda_sees():
    uuids = ["GPU-aa", "GPU-ab", "GPU-b"]

    def seen(text):
        return gpu.visible(3, uuids, {"CUDA_VISIBLE_DEVICES": text})

    assert gpu.visible(3, uuids, {}) == [0, 1, 2]
    assert (seen("2,0"), seen(""), seen("GPU-b,1"), seen("1,7,0")) == ([2, 0], [], [2, 1], [1])


# --- Those who connect and say nothing


def a_job():
    return Job("train.py", "node", 7, 0.0, 1.0, [])


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as made:
        return made.getsockname()[1]


@contextlib.contextmanager
def crowd(port, number):
    """Connects so many clients that say nothing; gives them once each has come to its place."""
    before = threading.active_count()

    def wait_for(number):
        end = time.monotonic() + 20
        while threading.active_count() != before + number and time.monotonic() < end:
            time.sleep(0.01)

    with contextlib.ExitStack() as sockets:
        made = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(number)]
        for one in made:
            sockets.enter_context(one)
        wait_for(min(number, 16))
        yield made, threading.active_count() - before
    wait_for(0)


def test_strangers_at_the_port_are_so_many_and_no_more(free_port, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    published = publish_at_port(a_job, free_port)
    token = published.file.read_text().strip()
    try:
        known = jobs_at("127.0.0.1", free_port, token)
        assert next(known).name == "train.py"  # who is known takes nobody's place
        with crowd(free_port, 20) as (strangers, threads):
            assert threads == 16
            turned_away = strangers[16:]
            assert [one.recv(1) for one in turned_away] == [b""] * 4
            with pytest.raises((OSError, StopIteration)):
                next(jobs_at("127.0.0.1", free_port, token))
            assert next(known).name == "train.py"
            strangers[0].sendall(b"no token\n")
            assert b"not that of this job" in strangers[0].recv(100)
            assert next(jobs_at("127.0.0.1", free_port, token)).name == "train.py"
    finally:
        published.close()


def test_a_token_that_comes_byte_by_byte_is_not_waited_for(free_port, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("keras_dist.watching.publish.CLIENT_SECONDS", 0.5)
    published = publish_at_port(a_job, free_port)
    began = time.monotonic()
    try:
        with (
            socket.create_connection(("127.0.0.1", free_port), 20) as slow,
            pytest.raises(OSError, match=r"Broken pipe|reset by peer"),
        ):
            for _ in range(80):
                slow.sendall(b"x")
                time.sleep(0.1)
    finally:
        published.close()
    assert time.monotonic() - began < 7


def test_requests_over_http_are_so_many_and_no_more(free_port):
    endpoint = Endpoint(a_job, "127.0.0.1", free_port)
    try:
        with crowd(free_port, 20) as (strangers, threads):
            assert threads == 16
            assert [one.recv(1) for one in strangers[16:]] == [b""] * 4
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=20) as answer:
            assert b"keras_dist_ranks" in answer.read()
    finally:
        endpoint.close()
