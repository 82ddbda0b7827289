"""The connections of mpiexec to other hosts: what is noted when they end, and how the job ends."""

import os
import subprocess

import pytest

from keras_dist.launch.cli import job_process
from keras_dist.launch.cli.mpiexec import Library
from keras_dist.launch.remote_shell import agent_command, read_notes, watched_connections

OPEN_MPI = Library("Open MPI", (5, 0), "Open MPI v5.0")
MPICH = Library("MPICH", (4, 2), "MPICH 4.2")


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
        ("exit 0", 0, {}),
        ("exit 3", 3, {}),  # by its command
        ("exit 255", 255, {"host1": 255}),
        ("kill -KILL $$", 128 + 9, {"host1": -9}),
    ],
)
def test_a_connection_that_breaks_is_noted(enter, ssh, code, noted):
    assert enter(ssh) == (code, noted, "")


@pytest.mark.parametrize(
    ("limit", "options"),
    [
        (0, ""),
        (3, "-o ServerAliveInterval=1 -o ServerAliveCountMax=4 "),
        (600, "-o ServerAliveInterval=120 -o ServerAliveCountMax=4 "),
    ],
)
def test_ssh_asks_whether_the_host_is_alive(enter, limit, options):
    assert enter('echo "$*"', limit) == (0, {}, f"-x {options}host1 daemon --some option")


def test_only_open_mpi_enters_hosts_by_another_program():
    for library, ssh in ((MPICH, "/bin/ssh"), (OPEN_MPI, None), (OPEN_MPI, "/has blanks/ssh")):
        with watched_connections(library, ssh, 5) as connections:
            connections.begin()
            assert (connections.variables, connections.lost()) == ({}, "")


def test_the_error_names_the_host(tmp_path):
    with watched_connections(OPEN_MPI, "/bin/false", 5) as connections:
        agent = connections.variables["PRTE_MCA_plm_ssh_agent"].split()
        notes = next(word for word in agent if word.startswith("--notes=")).partition("=")[2]
        assert connections.lost() == ""
        with open(notes, "w") as file:
            file.write("host2 255\n")
        expected = "Expected host2 to answer until the job ends. Received: exit code 255 of ssh to"
        assert expected in connections.lost()
        assert "5 s without an answer" in connections.lost()
        connections.begin()
        assert connections.lost() == ""
    assert not os.path.exists(os.path.dirname(notes))


@pytest.mark.parametrize(
    "words", [["sleep", "60"], ["sh", "-c", "trap '' TERM; sleep 60"], ["true"]]
)
def test_a_job_that_has_lost_a_host_ends_and_has_failed(words, monkeypatch):
    monkeypatch.setattr(job_process, "LOST_SECONDS", 0.1)
    ended = job_process.run_job(words, dict(os.environ), lost=lambda: True)
    assert ended.code != 0
    assert (ended.signal, ended.timed_out) == (None, False)
