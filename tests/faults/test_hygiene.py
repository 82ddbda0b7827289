"""Forks, threads and interpreter shutdown: nothing hangs, and no child acts as a rank."""

import pytest

NO_RANK = "an error in the child says that it is not a rank; the job continues and succeeds"


def assert_fine(ended, ranks):
    """Checks that all ranks finished their scripts and the job succeeded."""
    assert (ended.returncode, ended.stdout.count("fine")) == (0, ranks), ended.stdout


@pytest.mark.short
@pytest.mark.fault(
    "a fork after `init` whose child uses keras_dist, raises or exits", NO_RANK, within=5
)
def test_a_forked_child_is_no_rank(job):
    ended = job(2, "forks.py", "forked")
    assert_fine(ended, 2)
    assert "errors.LaunchError: [keras_dist] Expected the process that has called" in ended.stdout


@pytest.mark.fault("a fork after `init`, under Open MPI", NO_RANK, within=15)
def test_a_forked_child_is_no_rank_under_open_mpi(job, open_mpi):
    assert_fine(job(2, "forks.py", "forked", python=open_mpi), 2)


@pytest.mark.fault(
    "a script without `__main__` guard runs again in a spawned child", NO_RANK, within=20
)
def test_a_spawned_child_is_no_rank(job):
    ended = job(2, "spawning.py")
    assert_fine(ended, 2)
    for printed in ended.stdout.split("all have spawned"):
        assert "Received: a child of it started by multiprocessing" in printed


@pytest.mark.fault(
    "several Python threads call collectives at once",
    "they run in sequence, with correct results",
    within=20,
)
@pytest.mark.fault(
    "several `init` and `shutdown`, with the end of the script in any of these states",
    "the job succeeds",
    within=20,
)
@pytest.mark.parametrize("last", ["init", "shutdown"])
def test_threads_stand_in_line_between_init_and_shutdown(job, last):
    assert_fine(job(2, "forks.py", "init_and_shutdown", last), 2)


@pytest.mark.fault(
    "several Python threads are the first to use keras_dist, without `init`",
    "the ranks are connected once, and the job succeeds",
    within=20,
)
def test_threads_are_the_first_to_use_ranks(job):
    assert_fine(job(2, "forks.py", "first_use_by_threads"), 2)


@pytest.mark.fault(
    "handlers of `atexit` that use keras_dist, from before and after its import",
    "the later one works, the earlier one gets an error that the ranks have left; no hang",
    within=5,
)
@pytest.mark.parametrize("loads", ["", "from mpi4py import MPI"])
def test_the_order_of_handlers_at_exit(job, loads):
    ended = job(2, "forks.py", "handlers_at_exit", loads)
    assert_fine(ended, 2)
    assert ended.stdout.count("late 2.0") == 2
    assert "early 2.0" not in ended.stdout
    assert ended.stdout.count("from an atexit handler, after the job has ended") == 2


@pytest.mark.fault(
    "the user's script raises in a handler of `atexit`",
    "as in one process: a traceback, and the exit code is unchanged; no hang",
    within=5,
)
@pytest.mark.fault(
    "the modules of keras_dist are removed before the interpreter ends", "no hang", within=5
)
def test_an_end_without_modules(job):
    ended = job(2, "forks.py", "without_modules")
    assert_fine(ended, 2)
    assert ended.stdout.count("ValueError: broken on purpose") == 2


@pytest.mark.fault(
    "ranks wait for a rank that computes for a long time",
    "they use less than 30 % of a core, in a collective and at the end of the script",
    within=20,
)
@pytest.mark.parametrize("way", ["copy", "mpi"])
def test_waiting_ranks_leave_their_cores(job, way):
    ended = job(2, "forks.py", "waiting", KERAS_DIST_REDUCE=way)
    assert_fine(ended, 1)
