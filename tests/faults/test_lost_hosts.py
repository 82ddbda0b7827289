"""Faults of the network and of whole hosts: two test hosts of this machine, connected by TCP."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from endings import SCRIPTS, end_after
from namespaces import INTERFACE, MPICH, TOLD, hosts_or_skip, mpiexec_command
from start_jobs import allowed, lean, wait_for

QUEUE = f"tc qdisc replace dev {INTERFACE} root tbf"
LIMITS = {"KERAS_DIST_STALL_SECONDS": "2", "KERAS_DIST_STALL_ABORT_SECONDS": "5"}


@pytest.fixture
def two_hosts():
    """Two test hosts, and a stand-in for ssh; skips the test without them."""
    with hosts_or_skip(2) as made:
        yield made


@pytest.fixture
def run(request, two_hosts, tmp_path):
    """A function that runs a program on two hosts, injects a fault, and returns code and output.

    With `launches`, a list of options, `keras-dist run` starts the job, else mpiexec.
    """
    hosts, reach = two_hosts
    within = request.node.get_closest_marker("fault").kwargs["within"]

    def call(python, inject, launches=None, **variables):
        command, settings = mpiexec_command(python, hosts, reach, 1)
        if launches is not None:
            command, settings = launcher_command(python, hosts, reach, tmp_path / "bin")
            command += launches
        script = SCRIPTS / "on_hosts.py"
        arguments = [*hosts[0].enter, *command, python, script, "steps"]
        environment = lean(FAULT_FOLDER=str(tmp_path), **settings, **variables)
        begin = functools.partial(inject, *hosts)
        return end_after(begin, tmp_path / "ready", arguments, environment, hosts, within)

    return call


def launcher_command(python, hosts, reach, folder):
    """Returns the command of `keras-dist run` on hosts, and its environment."""
    folder.mkdir()
    (folder / "ssh").symlink_to(reach)
    names = ",".join(host.name for host in hosts)
    one_interface = {"HYDRA_IFACE": INTERFACE, "PRTE_MCA_prte_if_include": INTERFACE}
    one_interface |= {"OMPI_MCA_btl_tcp_if_include": INTERFACE, "OMPI_MCA_btl": "tcp,self,sm"}
    path = f"{folder}:{python.parent}:{os.environ['PATH']}"
    command = [python, "-m", "keras_dist.launch.cli", "run", "--hosts", names]
    return command, {**MPICH, **one_interface, "PATH": path}


@pytest.mark.fault(
    "a host of two is lost: its link is down, its processes are killed, under MPICH",
    "at `KERAS_DIST_STALL_ABORT_SECONDS` (here 5) the job ends, exit code not 0",
    within=30,
)
def test_a_host_is_lost(run):
    python = Path(sys.executable)
    code, printed = run(python, lambda first, second: second.lose(), **LIMITS)
    assert code != 0, printed


@pytest.mark.fault(
    "a host of two is lost, under `keras-dist run` with MPICH or Open MPI",
    "at `KERAS_DIST_STALL_ABORT_SECONDS` (here 5) the job ends, exit code not 0; nothing is left, "
    "and with Open MPI an error names the host",
    within=30,
)
def test_a_host_of_the_launcher_is_lost(run, python_of_library):
    # Here ssh hangs; in the next test it ends.
    code, printed = run(python_of_library, lambda _, second: second.lose(), launches=[], **LIMITS)
    assert code not in (None, 0), printed
    if "openmpi" in str(python_of_library):
        expected = "Expected host2 to answer until the job ends. Received: exit code 255 of ssh to"
        assert expected in printed, printed


@pytest.mark.fault(
    "a host of two is lost, under `keras-dist run --max-restarts` with Open MPI, whose mpiexec "
    "returns exit code 0 where ssh ends",
    "the job is not taken for successful: it restarts",
    within=60,
)
def test_a_job_that_has_lost_a_host_restarts(run, open_mpi):
    def lose_for_a_second(first, second):
        second.lose()
        time.sleep(1)
        second.link("up")

    variables = {**LIMITS, TOLD: "1", "KERAS_DIST_STALL_ABORT_SECONDS": "20"}
    code, printed = run(open_mpi, lose_for_a_second, launches=["--max-restarts", "1"], **variables)
    assert "Received: exit code 255 of ssh to host2" in printed, printed
    assert "Restart 1 of 1 in 1 s" in printed, printed
    assert code == 0 and printed.count("ends well") == 2, printed


@pytest.mark.fault(
    "a host is lost, under `keras-dist run --max-restarts` with Open MPI, whose mpiexec returns "
    "exit code 0 before ssh ends",
    "the launcher waits for ssh; the job is not taken for successful: it restarts",
    within=60,
)
def test_a_job_whose_mpiexec_notices_a_lost_host_first_restarts(run, open_mpi):
    def kill_for_a_second(first, second):
        second.lose()
        time.sleep(1)
        second.link("up")

    variables = {**LIMITS, "KERAS_DIST_STALL_ABORT_SECONDS": "10"}
    launches = ["--max-restarts", "1", "--standby", "0"]
    code, printed = run(open_mpi, kill_for_a_second, launches=launches, **variables)
    assert "of ssh to host2" in printed, printed
    assert code == 0 and printed.count("ends well") == 2, printed


@pytest.mark.fault(
    "a host is lost as a job ends, under `keras-dist run` with MPICH, whose mpiexec waits for ssh",
    "ssh asks whether the host is alive: the job ends at `KERAS_DIST_STALL_ABORT_SECONDS` (here 5)",
    within=30,
)
def test_mpiexec_of_mpich_does_not_wait_forever_for_ssh(two_hosts, tmp_path):
    hosts, reach = two_hosts
    folder = tmp_path / "bin"
    command, settings = launcher_command(Path(sys.executable), hosts, reach, folder)
    (folder / "ssh").rename(folder / "enter")
    (folder / "ssh").write_text(
        f'#!/bin/sh\n{folder}/enter "$@"\n'
        'case "$*" in *hydra_pmi_proxy*) ;; *) exit ;; esac\n'
        'case "$*" in *ServerAliveInterval=1*) sleep 5; exit 255 ;; esac\nexec sleep 600\n'
    )
    (folder / "ssh").chmod(0o755)
    environment = lean(**settings, KERAS_DIST_STALL_ABORT_SECONDS="5")
    words = [str(word) for word in [*hosts[0].enter, *command, "true"]]
    # mpiexec fails if it waits for ssh, which depends on time.
    subprocess.run(words, env=environment, timeout=allowed(30), check=False)


@pytest.mark.fault(
    "the link of a host goes down for 3 s, with MPICH and with Open MPI on two hosts",
    "the reduction waits, and the job continues; results are right",
    within=60,
)
@pytest.mark.fault(
    "a host is slow: its processes run for 0.1 s of each 0.5 s, with MPICH and with Open MPI",
    "all ranks go on at its speed; results are right",
    within=60,
)
@pytest.mark.fault(
    "packets between two hosts are lost: a queue of 16 KiB at 400 Mbit/s, with MPICH and with Open "
    "MPI",
    "TCP sends them again; results are right",
    within=60,
)
@pytest.mark.fault(
    "the link of one host is slow: 40 Mbit/s, with MPICH and with Open MPI",
    "all ranks go on at its speed; results are right",
    within=60,
)
def test_a_bad_network_and_a_slow_host(run, python_of_library, tmp_path):
    def done():
        return (tmp_path / "ready").stat().st_size

    def wait_for_steps(count):
        goal = done() + count
        assert wait_for(lambda: done() >= goal, 60)

    def inject(first, second):
        second.link("down")
        time.sleep(3)
        second.link("up")
        for _ in range(8):
            second.signal(signal.SIGSTOP)
            time.sleep(0.4)
            second.signal(signal.SIGCONT)
            time.sleep(0.1)
        wait_for_steps(10)
        second.run(*f"{QUEUE} rate 400mbit burst 8k limit 16k".split())
        wait_for_steps(35)
        [counted] = json.loads(second.run(*f"tc -s -j qdisc show dev {INTERFACE} root".split()))
        assert counted["drops"] > 0, counted
        second.run(*f"{QUEUE} rate 40mbit burst 32k latency 400ms".split())
        wait_for_steps(15)
        (tmp_path / "enough").touch()

    code, printed = run(python_of_library, inject)
    assert code == 0 and printed.count("ends well") == 2, printed
