"""The processes that stand by for a restart, as the launcher sees them; without MPI."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
from start_jobs import wait_for

from keras_dist.launch.cli import command, standby

HERE = str(Path(__file__))
# A rank that stands by: it prints what it is told, or ends with the connection.
RANK = """
import os, pathlib, sys
fails = pathlib.Path(os.environ.get("FAILS_ONCE", "/no such file"))
if fails.exists():
    fails.unlink()
    sys.exit("The MPI library cannot start.")
from keras_dist.launch.channel import Channel, connected
token, address, *others = os.environ["KERAS_DIST_STANDBY_SERVER"].split("@")
channel = Channel(connected(address, 5))
restart = int(os.environ["KERAS_DIST_RESTART"])
assert channel.introduce(token, {"rank": 0, "size": int(sys.argv[1]), "restart": restart})
channel.send(event="noticed", steps=3)
message = channel.receive()
print(sys.argv[1:], message, flush=True)
"""


@pytest.fixture
def ready(monkeypatch):
    """A function that returns a standby whose only process is ready, and command and variables."""
    monkeypatch.setattr(standby, "START_SECONDS", 0.0)
    opened = []

    def make(size=1, hosts=None, **variables):
        environment = {**os.environ, "KERAS_DIST_RESTART": "0", **variables}
        context = standby.standing_by(environment, hosts, 1, 2)
        opened.append(context)
        made = context.__enter__()
        command = [sys.executable, "-c", RANK, str(size), "train.py"]
        environment["KERAS_DIST_RESTART"] = "1"
        made.prepare(command, environment)
        assert wait_for(lambda: made.has_progressed)
        return made, command, environment

    yield make
    for context in opened:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("hosts", [None, ["localhost"]], ids=["socket", "port"])
def test_a_restart_is_the_process_that_stands_by(ready, capfd, hosts):
    made, command, environment = ready(hosts=hosts)
    process = made.take(command, {**environment, "NEW": "1"})
    assert process.wait(60) == 0
    words = ["1", "--standby", "2", "train.py"]
    assert capfd.readouterr().out == f"{words} {{'environment': {{'NEW': '1'}}}}\n"


def test_processes_that_fail_to_start_are_started_again(ready, monkeypatch, tmp_path):
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    fails = tmp_path / "fails"
    fails.touch()
    made, command, environment = ready(FAILS_ONCE=str(fails))
    assert not fails.exists()
    assert made.take(command, environment).wait(60) == 0


@pytest.mark.parametrize("case", ["another command", "a rank is missing", "none is started"])
def test_other_restarts_are_ordinary_starts(ready, capfd, case):
    made, command, environment = ready(size=2 if case == "a rank is missing" else 1)
    if case == "none is started":
        made.take(command, environment)
    wanted = [*command, "more"] if case == "another command" else command
    assert made.take(wanted, environment) is None
    if case != "none is started":
        assert capfd.readouterr().out.endswith("None\n")  # the process has ended


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([sys.executable, HERE, "-u"], 1),
        ([sys.executable, "-u", "-O", HERE], 3),
        ([sys.executable, "-m", "train"], 1),
        ([sys.executable, "-m"], 0),
        ([sys.executable, "-X", "dev", HERE], 0),
        ([sys.executable, "-c", "pass"], 0),
        ([sys.executable, "-"], 0),
        (["sh", HERE], 0),
        (["no-such-program"], 0),
    ],
)
def test_python_runs_a_script_or_a_module(words, count):
    assert command.words_of_python(words) == count


def test_the_python_of_another_environment_does_not(tmp_path):
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert command.words_of_python([str(link), HERE]) == 0


def test_a_job_runs_without_a_socket(tmp_path, monkeypatch):
    folder = tmp_path / ("a" * 100)  # a path longer than those of sockets
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    environment = {}
    with standby.standing_by(environment, None, 1, 1) as made:
        assert made is None
    assert not environment
