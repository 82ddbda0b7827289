"""`keras-dist run --hosts` names a host that cannot be entered, before it starts anything."""

import os
import re
import sys

import pytest
import start_jobs
from namespaces import hosts_or_skip

from keras_dist import errors
from keras_dist.launch.cli import hosts, main, run
from keras_dist.launch.cli.hosts import check_reach, ssh_of_mpiexec
from keras_dist.launch.cli.job_process import Ended

ELSEWHERE = "192.0.2.7"  # an address for documentation, which no host has
THERE = 'shift 4; [ "$1" = 192.0.2.7 ] || exit 255; shift; '


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A function that checks hosts while `ssh` is a script with the given text."""

    def call(text, *names):
        ssh = tmp_path / "ssh"
        ssh.write_text(f"#!/bin/sh\n{text}\n")
        ssh.chmod(0o755)
        check_reach(names or [ELSEWHERE], str(ssh))

    return call


def test_a_host_with_the_same_python_passes(check):
    check(f'{THERE} echo a greeting; sh -c "$*"')


def test_this_host_is_not_entered(check):
    check("exit 255", "localhost", "127.0.0.1")


def test_mpiexec_may_have_another_launcher(tmp_path):
    (tmp_path / "ssh").touch(0o755)
    path = {"PATH": str(tmp_path)}
    assert ssh_of_mpiexec(path) == str(tmp_path / "ssh")
    assert ssh_of_mpiexec({"PATH": "/nowhere"}) is None
    assert ssh_of_mpiexec({**path, "HYDRA_LAUNCHER": "rsh"}) is None
    assert ssh_of_mpiexec({**path, "PRTE_MCA_plm_ssh_agent": "/bin/enter"}) is None


@pytest.mark.parametrize(
    ("ssh", "expected", "received"),
    [
        (
            "echo a line >&2; echo Permission denied >&2; exit 255",
            "to enter 192.0.2.7 with ssh",
            "exit code 255 (Permission denied) from 192.0.2.7. `ssh -o BatchMode=yes ",
        ),
        (
            'echo "sh: 1: python: not found" >&2; exit 127',
            rf"Python {hosts.PYTHON} at \S+ on 192.0.2.7",
            "exit code 127 (sh: 1: python: not found) from 192.0.2.7. Install the same environment",
        ),
        (
            f"echo python {hosts.PYTHON.replace('.', ' ')}; echo mpi Some MPI 1.0",
            r"(MPICH|Open MPI)\b.*, the MPI library of this host, at \S+ on 192.0.2.7",
            "Some MPI 1.0 from 192.0.2.7. Install the same environment",
        ),
        (
            f"echo python {hosts.PYTHON.replace('.', ' ')}; echo no mpi4py >&2; exit 1",
            r"(MPICH|Open MPI)\b.*, the MPI library of this host, at \S+ on 192.0.2.7",
            "exit code 1 (no mpi4py) from 192.0.2.7. Install the same environment",
        ),
        (
            "echo python 3 8",
            rf"Python {hosts.PYTHON} at \S+ on 192.0.2.7",
            "Python 3.8 from 192.0.2.7. Install the same environment",
        ),
    ],
)
def test_a_host_that_cannot_take_part_is_named(check, ssh, expected, received):
    with pytest.raises(errors.LaunchError, match=f"Expected {expected}") as caught:
        check(ssh)
    assert f"Received: {received}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_that_does_not_answer_is_named(check, monkeypatch):
    monkeypatch.setattr(hosts, "SECONDS", 1)
    with pytest.raises(errors.LaunchError, match=r"no answer within 1 s from 192\.0\.2\.7"):
        check("exec sleep 60")


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ([], {"SLURM_JOB_ID": "1"}),
        (["--mpi-args", "-launcher rsh"], {}),
        (["--dry-run"], {}),
    ],
)
def test_hosts_are_not_entered_where_mpiexec_may_use_other_means(
    tmp_path, monkeypatch, words, variables
):
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ntouch {tmp_path}/entered; exit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "run_job", lambda *_: Ended(0, None, False))
    assert main(["run", "-np", "1", "--hosts", ELSEWHERE, *words, "true"]) == 0
    assert not (tmp_path / "entered").exists()


def test_a_host_that_is_lost_between_two_starts_is_tried_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "ssh").write_text(
        f"#!/bin/sh\n[ ! -e {tmp_path}/once ] || exit 255\ntouch {tmp_path}/once\n"
        'shift 5; sh -c "$*"\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ends = iter([Ended(1, None, False), Ended(0, None, False)])
    monkeypatch.setattr(run, "run_job", lambda *_: next(ends))
    assert main(["run", "-np", "1", "--hosts", ELSEWHERE, "--max-restarts", "1", "true"]) == 0
    assert "Restart 1 of 1" in capsys.readouterr().err


def test_jobs_on_hosts(tmp_path, python_of_library):
    with hosts_or_skip(2) as (hosts, enter):
        (tmp_path / "ssh").symlink_to(enter)
        first = [str(python_of_library), "-m", "keras_dist.launch.cli"]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

        def run_on(names):
            program = [sys.executable, "-c", "import os; print('ran on', os.uname().nodename)"]
            words = [*first, "run", "-np", "2", "--hosts", names, *program]
            return start_jobs.run([*hosts[0].enter, *words], env=environment)

        job = run_on(f"{hosts[0].name},{hosts[1].name}")
        assert job.returncode == 0, job.stdout
        told = re.findall(r"ran on (\S+)", job.stdout)
        assert sorted(told) == [host.name for host in hosts], job.stdout
        job = run_on(f"{hosts[0].name},{ELSEWHERE}")
        assert job.returncode != 0
        assert f"Expected to enter {ELSEWHERE} with ssh. Received: exit code 255 (no test host" in (
            job.stdout
        )
