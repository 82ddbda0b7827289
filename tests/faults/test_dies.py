"""A rank dies without an error: all other ranks end, and nothing is left behind."""

import mmap
import os
from pathlib import Path

import pytest

ENDS = "all ranks end, exit code not 0"
LARGE = ("--turns", 20, "--size", 100_000)


@pytest.mark.short
@pytest.mark.fault("a rank is killed while others wait in shared memory", ENDS, within=5)
def test_a_killed_rank(meet):
    meet(3, "1:SIGKILL", *LARGE).failed()


@pytest.mark.fault("a rank is killed while others wait in MPI", ENDS, within=5)
def test_a_killed_rank_where_data_goes_through_mpi(meet):
    meet(3, "1:SIGKILL", *LARGE, KERAS_DIST_REDUCE="mpi").failed()


@pytest.mark.fault("the root is killed while others wait on another node", ENDS, within=5)
def test_a_killed_root(meet):
    meet(4, "0:SIGKILL", *LARGE, MPIR_CVAR_NUM_CLIQUES="2").failed()


@pytest.mark.fault("a rank is killed, under Open MPI", ENDS, within=5)
def test_a_killed_rank_under_open_mpi(meet, open_mpi):
    meet(3, "1:SIGKILL", *LARGE, python=open_mpi).failed()


@pytest.mark.fault("a rank is killed before `keras_dist.init()`", ENDS, within=5)
def test_a_rank_killed_before_init(meet):
    meet(2, "1:SIGKILL", "--early").failed()


@pytest.mark.short
@pytest.mark.fault("a rank is killed while it computes in `fit`", ENDS, within=5)
def test_a_rank_killed_in_fit(fit_job):
    fit_job("fit_faults.py", "killed_while_it_computes").failed()


@pytest.mark.fault(
    "a job was killed while MPI started, and has left its shared memory",
    "the next job of this user on the node removes it; what any process uses stays",
    within=5,
)
def test_memory_of_a_job_that_was_killed_while_mpi_started(meet):
    left, used = [Path(f"/dev/shm/mpich_shm_{os.getpid()}{end}") for end in "ab"]
    left.write_bytes(b"left")
    used.write_bytes(b"used")
    try:
        with used.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 4)
        meet(2, "1:SIGKILL", *LARGE).failed()
        assert (left.exists(), used.exists()) == (False, True)
        mapped.close()
    finally:
        left.unlink(missing_ok=True)
        used.unlink(missing_ok=True)


@pytest.mark.fault("all ranks are killed at once", ENDS, within=5)
def test_all_ranks_are_killed(meet):
    meet(2, "all:SIGKILL", *LARGE).failed()


@pytest.mark.fault("a rank has a segmentation fault", ENDS, within=5)
def test_a_segmentation_fault(meet):
    meet(2, "1:crash", *LARGE).failed()


@pytest.mark.fault("a rank aborts, as libraries in C do", ENDS, within=5)
def test_an_abort(meet):
    meet(2, "1:abort", *LARGE).failed()


@pytest.mark.fault(
    "a rank ends with `os._exit(0)` while others wait",
    "all ranks end; the exit code is 0 with MPICH, whose mpiexec returns that of the rank",
    within=5,
)
def test_a_rank_leaves_without_a_word(meet):
    # The other ranks would wait forever; only their end is checked.
    meet(3, "1:leave", *LARGE)


@pytest.mark.fault("a rank ends with `os._exit(0)`, under Open MPI", ENDS, within=5)
def test_a_rank_leaves_without_a_word_under_open_mpi(meet, open_mpi):
    meet(3, "1:leave", *LARGE, python=open_mpi).failed()


@pytest.mark.fault("Ctrl-C to mpiexec", "KeyboardInterrupt on every rank; all end", within=5)
def test_an_interrupt_of_mpiexec(meet):
    meet(2, "1:tell_mpiexec SIGINT", "--turns", 1, "--forever").failed()


@pytest.mark.short
@pytest.mark.fault("mpiexec itself is killed", "all ranks end", within=10)
def test_a_killed_mpiexec(meet):
    meet(2, "1:tell_mpiexec SIGKILL", "--turns", 1, "--forever").failed()


@pytest.mark.fault(
    "mpiexec itself is killed, under Open MPI",
    "all ranks end, by the stall watchdog; files of Open MPI stay in /dev/shm",
    within=10,
)
def test_a_killed_mpiexec_under_open_mpi(meet, open_mpi):
    how = {"python": open_mpi, "leaves": "sm_segment"}
    how["KERAS_DIST_STALL_SECONDS"] = "4"  # it checks four times as often
    meet(2, "1:tell_mpiexec SIGKILL", "--turns", 1, "--forever", **how).failed()
