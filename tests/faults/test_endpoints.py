"""Other users of the node cannot watch a job."""

import socket

import pytest


@pytest.mark.fault(
    "another user of the node sends a request to the port for Prometheus",
    "401 without the token, which only the owner of the job can read",
    within=10,
)
def test_a_stranger_asks_at_the_port(job, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as made:
        port = made.getsockname()[1]
    where = {"KERAS_DIST_PROMETHEUS_PORT": str(port), "XDG_RUNTIME_DIR": str(tmp_path)}
    ended = job(2, "observed.py", "asked_by_a_stranger", **where)
    assert ended.returncode == 0, ended.stdout
    assert "refused: 401 b'A token is required.\\n'" in ended.stdout
