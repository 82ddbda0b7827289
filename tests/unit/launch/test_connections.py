"""The connections of mpiexec to other hosts: what is noted when they end, and how the job ends."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from keras_dist.launch import remote_shell
from keras_dist.launch.cli import job_process
from keras_dist.launch.cli.mpiexec import Library
from keras_dist.launch.remote_shell import agent_command, read_notes, watched_connections

OPEN_MPI = Library("Open MPI", (5, 0), "Open MPI v5.0")
MPICH = Library("MPICH", (4, 2), "MPICH 4.2")
ALIVE = "-o ServerAliveInterval=1 -o ServerAliveCountMax=4"


@pytest.fixture
def enter(tmp_path):
    """A function that enters host1 while `ssh` is a shell script; returns code, notes, output."""

    def call(text, limit=0):
        ssh, notes = tmp_path / "ssh", tmp_path / "notes"
        ssh.write_text(f"#!/bin/sh\n{text}\n")
        ssh.chmod(0o755)
        command = [*agent_command(str(ssh), notes, limit), "host1", "daemon --some option"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        return ended.returncode, read_notes(notes), ended.stdout.strip()

    return call


@pytest.mark.parametrize(
    ("ssh", "code", "noted"),
    [
        ("exit 0", 0, {"host1": 0}),
        ("exit 3", 3, {"host1": 3}),
        ("exit 255", 255, {"host1": 255}),
        ("kill -KILL $$", 128 + 9, {"host1": -9}),
    ],
)
def test_the_end_of_a_connection_is_noted(enter, ssh, code, noted):
    assert enter(ssh) == (code, noted, "")


@pytest.mark.parametrize(
    ("limit", "options"),
    [
        (0, ""),
        (3, f"{ALIVE} "),
        (600, "-o ServerAliveInterval=120 -o ServerAliveCountMax=4 "),
    ],
)
def test_ssh_asks_whether_the_host_is_alive(enter, limit, options):
    printed = f"-x -o ControlMaster=no {options}host1 daemon --some option"
    assert enter('echo "$*"', limit) == (0, {"host1": 0}, printed)


@pytest.mark.parametrize(
    ("library", "ssh", "limit", "variables"),
    [
        (MPICH, "/bin/ssh", 5, {"HYDRA_LAUNCHER_EXTRA_ARGS": ALIVE}),
        (MPICH, "/bin/ssh", 0, {}),
        (MPICH, None, 5, {}),
        (OPEN_MPI, None, 5, {}),
        (OPEN_MPI, "/has blanks/ssh", 5, {}),
    ],
)
def test_only_open_mpi_enters_hosts_by_another_program(library, ssh, limit, variables):
    with watched_connections(library, ssh, limit) as connect:
        connections = connect()
        assert (connections.variables, connections.lost()) == (variables, "")
        assert connections.lost(has_succeeded=True) == ""


@pytest.fixture
def watched(monkeypatch):
    """The connections of a start, and a function that writes its notes."""
    monkeypatch.setattr(remote_shell, "GRACE_SECONDS", 0.1)
    with watched_connections(OPEN_MPI, "/bin/false", 5) as connect:
        connections, another = connect(), connect()
        agent = connections.variables["PRTE_MCA_plm_ssh_agent"].split()
        notes = next(word for word in agent if word.startswith("--notes=")).partition("=")[2]
        yield connections, Path(notes).write_text
        assert another.lost(has_succeeded=True) == ""  # each start has notes of its own
        connections.close()
        assert not os.path.exists(notes)
    assert not os.path.exists(os.path.dirname(notes))


def test_the_error_names_the_host(watched):
    connections, note = watched
    assert connections.lost() == ""
    note("host2 runs\nhost3 runs\nhost2 255\n")
    expected = "Expected host2 to answer until the job ends. Received: exit code 255 of ssh to"
    assert expected in connections.lost()
    assert "5 s without an answer" in connections.lost()


@pytest.mark.parametrize(
    ("noted", "error"),
    [
        ("host2 runs\nhost2 0\n", ""),
        ("host2 runs\nhost2 3\n", ""),  # by its command: a rank has died, and others went on
        ("host2 runs\n", "Received: no end of ssh to host2"),
        ("host2 runs\nhost2 255\n", "Received: exit code 255 of ssh to host2"),
    ],
)
def test_a_success_of_mpiexec_is_one_if_all_connections_end(watched, noted, error):
    connections, note = watched
    note(noted)
    for found in (connections.lost(has_succeeded=True), connections.lost()):
        assert error in found
        assert bool(error) == bool(found)


def test_a_launcher_under_nohup_ignores_the_end_of_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with job_process.terminating_signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
            words = ["sh", "-c", f"kill -HUP {os.getpid()}; sleep 0.2; exit 7"]
            ended = job_process.run_job(words, dict(os.environ))
            os.kill(os.getpid(), signal.SIGHUP)
        assert (ended.code, ended.signal) == (7, None)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "words", [["sleep", "60"], ["sh", "-c", "trap '' TERM; sleep 60"], ["true"]]
)
def test_a_job_that_has_lost_a_host_ends_and_has_failed(words, monkeypatch):
    monkeypatch.setattr(job_process, "LOST_SECONDS", 0.1)
    ended = job_process.run_job(words, dict(os.environ), lost=lambda _: True)
    assert ended.code != 0
    assert (ended.signal, ended.timed_out) == (None, False)
