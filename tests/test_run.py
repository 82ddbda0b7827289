"""`keras-dist run`: what it makes of its options, and of options that make no sense."""

import os
import shlex
import sys
from pathlib import Path

import pytest
from jobs import launcher

from keras_dist.cli import main

IS_OPEN_MPI = len(launcher()) > 1
HERE = str(Path(__file__))
MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))


@pytest.fixture
def dry_run(capsys, monkeypatch):
    """A function that returns the words of the command that some options stand for."""
    for name in [name for name in os.environ if name.startswith("KERAS_")]:
        monkeypatch.delenv(name)

    def run(*words):
        assert main(["run", "--dry-run", *words]) == 0
        return shlex.split(capsys.readouterr().out)

    return run


@pytest.fixture
def refuse(capsys):
    """A function that returns what is said about options that are refused."""

    def run(*words):
        try:
            code = main(["run", "--dry-run", *words])
        except SystemExit as ended:  # argparse
            code = ended.code
        assert code == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ([sys.executable, "train.py", "-np", "3"], [sys.executable, "train.py", "-np", "3"]),
        ([HERE, "--epochs", "3"], [sys.executable, HERE, "--epochs", "3"]),
        (["--", HERE], [sys.executable, HERE]),
        (["-m", "train", "--dry-run"], [sys.executable, "-m", "train", "--dry-run"]),
    ],
    ids=["python", "script", "dashes", "module"],
)
@pytest.mark.parametrize("ranks", ["-n", "-np"])
def test_everything_behind_the_options_is_the_program(dry_run, ranks, words, program):
    command = dry_run(ranks, "2", *words)
    assert command[:3] == [MPIEXEC, "-n", "2"]
    assert command[-len(program) :] == program


def test_open_mpi_is_told_what_it_wants_and_others_nothing(dry_run, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    few, many = dry_run("-n", "1", HERE), dry_run("-n", "4000", HERE)
    if not IS_OPEN_MPI:
        assert few == [MPIEXEC, "-n", "1", sys.executable, HERE]
        return
    assert ("--allow-run-as-root" in few) == (os.getuid() == 0)
    assert "--oversubscribe" not in few
    assert "--oversubscribe" in many
    passed = "-x KERAS_BACKEND -x KERAS_DIST_RESTART"
    assert shlex.join(few).endswith(f"{passed} {sys.executable} {HERE}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # which says how many slots there are
    assert "--oversubscribe" not in dry_run("-n", "4000", HERE)


def test_options_go_into_the_environment_of_the_ranks(dry_run):
    options = "--stall-seconds 5 --stall-abort-seconds 0".split()
    command = dry_run("-np", "2", *options, HERE)
    settings = ["KERAS_DIST_STALL_SECONDS=5", "KERAS_DIST_STALL_ABORT_SECONDS=0"]
    assert command[:4] == ["env", *settings, MPIEXEC]


@pytest.mark.filterwarnings("ignore:.*KERAS_DIST_ON_FAILURE")
def test_going_on_without_a_rank_is_asked_of_open_mpi_alone(dry_run):
    command = dry_run("-np", "2", "--on-failure", "continue", HERE)
    assert command[:2] == ["env", "KERAS_DIST_ON_FAILURE=continue"]
    assert ("--with-ft ulfm" in shlex.join(command)) == IS_OPEN_MPI


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-np 2", "Expected a program to start. Received: none. Name it behind the options"),
        ("-np 2 -m", "Expected a program to start. Received: none."),
        ("-np 2 no-such-program", "Expected a program to start. Received: 'no-such-program'."),
        ("-np 0 train.py", "-np/-n: expected a whole number, 1 or more: '0'"),
        ("train.py", "the following arguments are required: -np/-n"),
        ("-np 2 --max-restart 2 train.py", "unrecognized arguments: --max-restart"),
        ("-np 2 --max-restarts -1 train.py", "expected a whole number, 0 or more: '-1'"),
        ("-np 2 --on-failure restart train.py", "Say --max-restarts 3, for example."),
        ("-np 2 --on-failure stop --max-restarts 1 train.py", "Leave one of them out."),
        ("-np 2 --stall-seconds soon train.py", "Expected KERAS_DIST_STALL_SECONDS to be a whole"),
    ],
)
def test_what_makes_no_sense_is_refused(refuse, words, message):
    assert message in refuse(*words.split())


def test_the_mpiexec_of_another_library_is_not_taken(refuse, monkeypatch, tmp_path):
    other = tmp_path / "mpiexec"
    version = "HYDRA build details" if IS_OPEN_MPI else "mpiexec (Open MPI) 5.0.8"
    other.write_text(f"#!/bin/sh\necho '{version}'\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"Received: only {other}, of another library." in refuse("-np", "2", "/bin/true")
