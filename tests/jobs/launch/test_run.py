"""`keras-dist run`: the command of its options, and invalid options."""

import contextlib
import itertools
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from start_jobs import allowed, is_alive, launcher

from keras_dist.launch.cli import main
from keras_dist.launch.cli.job_process import Ended
from keras_dist.storage import memory_directory

pytestmark = pytest.mark.short

IS_OPEN_MPI = len(launcher()) > 1
HERE = str(Path(__file__))
MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))
LAUNCHED = [sys.executable, "-P", "-m", "keras_dist.launch.rank_wrapper"]


NOTEBOOK = [sys.executable, "-m", "keras_dist.launch.cli", "run-notebook"]


@pytest.fixture
def dry_run(capsys, monkeypatch):
    """A function that returns the words of the command for options."""
    for name in [name for name in os.environ if name.startswith(("KERAS_", "SLURM_"))]:
        monkeypatch.delenv(name)

    def run(*words):
        assert main(["run", "--dry-run", *words]) == 0
        return shlex.split(capsys.readouterr().out)

    return run


@pytest.fixture
def refuse(capsys):
    """A function that returns the error message for options."""

    def run(*words):
        try:
            code = main(["run", "--dry-run", *words])
        except SystemExit as ended:  # exit of argparse
            code = ended.code
        assert code == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ([sys.executable, HERE, "-np", "3"], [sys.executable, HERE, "-np", "3"]),
        ([HERE, "--epochs", "3"], [sys.executable, HERE, "--epochs", "3"]),
        (["--", HERE], [sys.executable, HERE]),
        (["-m", "train", "--dry-run"], [sys.executable, "-m", "train", "--dry-run"]),
        (["nb.ipynb", "-p", "a"], [*NOTEBOOK, "nb.ipynb", "-p", "a"]),
    ],
    ids=["python", "script", "dashes", "module", "notebook"],
)
@pytest.mark.parametrize("ranks", ["-n", "-np"])
def test_everything_behind_the_options_is_the_program(
    dry_run, monkeypatch, tmp_path, ranks, words, program
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nb.ipynb").touch()
    command = dry_run(ranks, "2", *words)
    assert command[:3] == [MPIEXEC, "-n", "2"]
    assert command[-len(program) - len(LAUNCHED) :] == [*LAUNCHED, *program]


def test_open_mpi_is_told_what_it_wants_and_others_nothing(dry_run, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    few, many = dry_run("-n", "1", HERE), dry_run("-n", "4000", HERE)
    if not IS_OPEN_MPI:
        assert few == [MPIEXEC, "-n", "1", *LAUNCHED, sys.executable, HERE]
        return
    assert ("--allow-run-as-root" in few) == (os.getuid() == 0)
    assert "--oversubscribe" not in few
    assert "--oversubscribe" in many
    passed = "--bind-to none -x KERAS_BACKEND -x KERAS_DIST_RESTART"
    assert shlex.join(few).endswith(f"{passed} {shlex.join(LAUNCHED)} {sys.executable} {HERE}")
    assert "--bind-to" not in dry_run("-n", "1", "--bind", "mpiexec", HERE)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # which has the number of slots
    assert "--oversubscribe" not in dry_run("-n", "4000", HERE)


def test_options_go_into_the_environment_of_the_ranks(dry_run):
    options = "--stall-seconds 5 --stall-abort-seconds 0 --fusion-threshold-mb 2 -x A=b=c".split()
    command = dry_run("-np", "2", *options, HERE)
    stall = ["KERAS_DIST_STALL_SECONDS=5", "KERAS_DIST_STALL_ABORT_SECONDS=0"]
    settings = ["A=b=c", *stall, f"KERAS_DIST_BUCKET_NBYTES={2 * 2**20}"]
    assert command[: 2 + len(settings)] == ["env", *settings, MPIEXEC]
    assert ("-x A" in shlex.join(command)) == IS_OPEN_MPI


@pytest.mark.filterwarnings("ignore:.*KERAS_DIST_ON_FAILURE")
def test_going_on_without_a_rank_is_asked_of_open_mpi_alone(dry_run):
    command = dry_run("-np", "2", "--on-failure", "continue", HERE)
    assert command[:2] == ["env", "KERAS_DIST_ON_FAILURE=continue"]
    assert ("--with-ft ulfm" in shlex.join(command)) == IS_OPEN_MPI


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-np 2", "Expected a program to start. Received: none. Put it after the options"),
        ("-np 2 -m", "Expected a program to start. Received: none."),
        ("-np 2 no-such-program", "Expected a program to start. Received: 'no-such-program'."),
        ("-np 0 train.py", "-np/-n/--num-proc: expected a whole number, 1 or more: '0'"),
        (HERE, "Expected the number of ranks. Received: none. Pass -np 2, for example."),
        ("-np 2 nothing.py", "Expected a program to start. Received: 'nothing.py', which does not"),
        ("-np 2 python nothing.py", "Received: 'nothing.py', which does not exist."),
        ("-np 2 nothing.ipynb", "Received: 'nothing.ipynb', which does not exist."),
        ("-np 3 -H h1:2 true", "have slots (h1:2). Received: -np 3."),
        ("-H h1 --hostfile hosts true", "Expected --hosts or --hostfile. Received: both."),
        ("-H h1 -x NOT_SET true", "Received: --env NOT_SET. Pass --env NOT_SET=VALUE."),
        ("-np 2 -x a-b true", "expected NAME or NAME=VALUE: 'a-b'"),
        ("-np 2 --mpi true", "--mpi of horovodrun does not apply. Leave it out:"),
        ("-np 2 --min-np 2 true", "Expected --min-np and --max-np with --host-discovery-script"),
        ("--on-failure continue --min-np 3 --max-np 2 true", "--max-np of --min-np or more"),
        ("-np 2 --on-failure continue --min-np 3 true", "-np of --min-np or more. Received: 2."),
        ("-np 4 --on-failure continue --max-np 3 true", "-np of --max-np or less. Received: 4."),
        ("-np 2 --join-directory d true", "--join-directory: ranks do not join a job that runs."),
        ("-np 2 --on-failure replace true", "do not join a job that runs. keras-dist run --max-r"),
        ("-H h1 --host-discovery-script ls true", "only --host-discovery-script"),
        ("-np 2 --host-discovery-script= true", "a command in --host-discovery-script"),
        ("--host-discovery-script false true", "Expected false to name 1 or more slots"),
        (f"--host-discovery-script {HERE} true", "Received: Permission denied: not an executable"),
        ("--host-discovery-script 'ls true", 'expected arguments: "\'ls": No closing quotation'),
        ("-np 2 --mpi-args 'a true", 'expected arguments: "\'a": No closing quotation'),
        ("-np 2 --max-restart 2 train.py", "unrecognized arguments: --max-restart"),
        ("-np 2 --max-restarts -1 train.py", "expected a whole number, 0 or more: '-1'"),
        (f"-np 2 --on-failure restart {HERE}", "Pass --max-restarts 3, for example."),
        (f"-np 2 --on-failure stop --max-restarts 1 {HERE}", "Leave one of them out."),
        (f"-np 2 --stall-seconds soon {HERE}", "Expected KERAS_DIST_STALL_SECONDS to be a whole"),
    ],
)
def test_wrong_arguments_are_refused(refuse, words, message):
    assert message in refuse(*words.split())


def test_the_mpiexec_of_another_library_is_not_taken(refuse, monkeypatch, tmp_path):
    other = tmp_path / "mpiexec"
    version = "HYDRA build details" if IS_OPEN_MPI else "mpiexec (Open MPI) 5.0.8"
    other.write_text(f"#!/bin/sh\necho '{version}'\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"Received: only {other}, of another library." in refuse("-np", "2", "/bin/true")


def test_no_shell_reads_the_words_of_options(dry_run, refuse, tmp_path):
    made = tmp_path / "made"
    words = f"$(touch {made}) `touch {made}` ; touch {made}"
    assert shlex.split(words) == dry_run("-np", "2", f"--mpi-args={words}", "true")[3:-5]
    said = refuse("--host-discovery-script", f"echo '{words}'", "true")
    assert f"Received: '{words}'." in said
    command = dry_run("--host-discovery-script", "echo 'h1:2'", "--max-np", "1", "true")
    assert command[1:3] == ["-n", "1"] and "h1:2" in command
    assert not made.exists()


def test_the_waiting_for_hosts_counts_as_time_of_the_job(capsys, tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\nsleep 100\n")
    script.chmod(0o755)
    for asked in (str(script), "echo h1:1"):  # it does not answer, or always with too few hosts
        words = ["--host-discovery-script", asked, "--min-np", "2", "--timeout", "1", "true"]
        began = time.monotonic()
        assert main(["run", *words]) == 124
        assert time.monotonic() - began < allowed(20)
        assert "no hosts were found within the time limit" in capsys.readouterr().err
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_backups_in_memory_are_removed_where_the_ranks_have_them(monkeypatch, tmp_path):
    monkeypatch.delenv("KERAS_DIST_JOB_ID", raising=False)
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "job")
    parent = tmp_path / f"keras_dist_backups-{os.getuid()}"
    parent.mkdir(mode=0o700)
    (parent / memory_directory.directory_of("job", tmp_path)).mkdir()
    where = f"KERAS_DIST_MEMORY_DIRECTORY={tmp_path}"
    assert main(["run", "-np", "1", "-x", where, "true"]) == 0
    assert not [*parent.iterdir()]


# --- What the end of a job leads to


@pytest.fixture
def ends(monkeypatch):
    """A function after which jobs end with exit codes at once, 75 after a change of the hosts."""

    def end(*codes):
        left = iter(codes)

        def run_job(command, environment, seconds, output, lost, follow, process):
            code = next(left)
            follow.__self__.has_asked = code == 75
            return Ended(code, None, False)

        monkeypatch.setattr("keras_dist.launch.cli.run.run_job", run_job)

    monkeypatch.setattr("keras_dist.launch.cli.run.MAX_PAUSE_SECONDS", 0)
    return end


def test_starts_on_other_hosts_are_no_restarts(ends, capsys, tmp_path):
    (tmp_path / "hosts").write_text("localhost:1\n")
    options = ["--hostfile", str(tmp_path / "hosts"), "--min-np", "1", "--max-restarts", "2"]
    ends(75, 7, 75, 7, 7)
    assert main(["run", *options, "true"]) == 7
    assert [line for line in capsys.readouterr().err.splitlines() if "failed" in line] == [
        "keras-dist: the job failed with exit code 7. Restart 1 of 2 in 0 s.",
        "keras-dist: the job failed with exit code 7. Restart 2 of 2 in 0 s.",
        "keras-dist: the job failed with exit code 7, after 2 restarts.",
    ]


def test_pauses_grow_with_failures_in_a_row_that_took_no_step(ends, capsys, monkeypatch):
    have_progressed = iter([False, False, True, False, False])

    class Standby:
        has_progressed = property(lambda self: next(have_progressed))

        def take(self, *given):
            return None

        def prepare(self, *given):
            pass

    run = "keras_dist.launch.cli.run"
    monkeypatch.setattr(f"{run}.standing_by", lambda *given: contextlib.nullcontext(Standby()))
    monkeypatch.setattr(f"{run}.MAX_PAUSE_SECONDS", 30)
    monkeypatch.setattr(f"{run}.time.sleep", lambda seconds: None)
    ends(*[7] * 6)
    assert main(["run", "-np", "1", "--max-restarts", "5", HERE]) == 7
    assert re.findall(r" in (\d+) s\.", capsys.readouterr().err) == ["1", "2", "0", "1", "2"]


@pytest.mark.parametrize(
    ("code", "backend", "is_told"),
    [(1, "nowhere", True), (1, "torch", False), (7, "nowhere", False)],
)
def test_a_backend_that_is_not_installed_is_named(ends, capsys, code, backend, is_told):
    ends(code)
    assert main(["run", "-np", "1", "--env", f"KERAS_BACKEND={backend}", HERE]) == code
    told = capsys.readouterr().err
    assert ("Keras selects the backend nowhere, which is not installed here" in told) == is_told


# --- Options in a file


def test_a_file_gives_options_and_the_command_line_wins(dry_run, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("np: 3\nhosts: h1:2,h2:2\nlog_dir: logs\nverbose: false\nenv: [A=1, B=2]\n")
    command = dry_run("--config-file", str(file), "-np", "2", "--env", "B=3", "true")
    assert command[:6] == ["env", "A=1", "B=3", MPIEXEC, "-n", "2"]
    pairs = [*itertools.pairwise(command)]
    assert ("--host" if IS_OPEN_MPI else "-hosts", "h1:2,h2:2") in pairs
    assert ("--log-dir", str(Path("logs").absolute())) in pairs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nproc: 2",
            "options in FILE that keras-dist run has. Received: 'nproc'",
        ),
        ("np: [2]", "np in FILE to have one value. Received: [2]"),
        ("np: true", "np in FILE to have a value. Received: True"),
        ("verbose: 1", "verbose in FILE to have true or false. Received: 1"),
        ("np: 0", "argument -np/-n/--num-proc: expected a whole number, 1 or more: '0'"),
        ("config-file: x", "Received: 'config-file'"),
        ("just words", "Expected FILE to hold lines like 'max-restarts: 3'"),
        ("a: b: c", "Expected a YAML file with options. Received: FILE: mapping values"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(refuse, tmp_path, text, message):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    assert message in refuse("--config-file", str(file), "-np", "2", "true").replace(
        str(file), "FILE"
    )


def test_join_names_what_to_use_instead(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["join", "directory", sys.executable, "-c", "pass"])
    message = " ".join(capsys.readouterr().err.split())
    assert "ranks do not join a job that runs. keras-dist run --max-restarts 3 starts" in message
