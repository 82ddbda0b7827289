"""Stalled ranks: the report, its time, and the end of the job."""

import re
import time

import pytest

from keras_dist._engine.sideband import branches

ENDS = (
    "after `KERAS_DIST_STALL_SECONDS` (here 1) it is named, {}; at the limit (here 3) the job ends"
)
CONTINUES = "after `KERAS_DIST_STALL_SECONDS` (here 1) it is named, {}; the job continues"


@pytest.fixture
def run_watched(job):
    """A function that runs a program on n ranks with short periods; see `job`."""

    def run(ranks, *words, period=1, limit=3, **options):
        periods = {
            "KERAS_DIST_STALL_SECONDS": str(period),
            "KERAS_DIST_STALL_ABORT_SECONDS": str(limit),
        }
        script = "meeting.py" if ":" in words[0] else "stalls.py"
        return job(ranks, script, *words, **periods, **options)

    return run


@pytest.mark.fault("a rank is in a long C call", CONTINUES.format("with its stack"), within=20)
def test_a_rank_inside_a_c_call_is_named_with_its_stack_and_the_job_goes_on(run_watched):
    printed = run_watched(3, "1:load_data", limit=0).succeeded()
    waited = r"keras_dist: ranks 0, 2 of 3 have waited \d+ s for rank 1 in allreduce\('loss'\)\."
    assert len(re.findall(waited, printed)) >= 2
    assert printed.count("in load_data") == printed.count("keras_dist: ")
    assert "The job ends" not in printed


@pytest.mark.short
@pytest.mark.fault(
    "a rank does not arrive",
    ENDS.format("with its stack, and with all stacks at the end"),
    within=15,
)
def test_after_the_limit_the_job_ends_with_all_stacks(run_watched):
    began = time.monotonic()
    printed = run_watched(3, "1:stay_away").failed()
    assert time.monotonic() - began > 3
    first, last = printed.split("The job ends now: the limit is 3 s")
    assert "s for rank 1 in allreduce('loss'). The job ends after 3 s" in first
    assert "in stay_away" in first and "in train" not in first
    assert "in stay_away" in last and "in train" in last


@pytest.mark.fault(
    "a rank is in a long call that holds the interpreter lock",
    CONTINUES.format("without a stack"),
    within=20,
)
def test_a_rank_that_keeps_the_interpreter_is_said_not_to_answer(run_watched):
    printed = run_watched(2, "1:hold_lock 4_500_000", limit=0).succeeded()
    assert "has waited" in printed and "for rank 1 in allreduce('loss')" in printed
    assert ": no answer, the process is stopped, or in a call that holds" in printed


@pytest.mark.fault("the root is stopped (SIGSTOP)", ENDS.format("by the next rank"), within=15)
def test_a_stopped_root_is_named_by_the_next_rank_and_the_job_ends(run_watched):
    printed = run_watched(3, "0:SIGSTOP").failed()
    assert re.search(r"ranks 1, 2 of 3 have waited \d+ s for rank 0 in allreduce", printed)
    assert "no answer, the process is stopped (SIGSTOP, or a debugger)" in printed


@pytest.mark.fault(
    "of 12 ranks, one that asks another for the root is stopped (SIGSTOP), and the other does not "
    "arrive",
    ENDS.format("the latter with its stack"),
    within=30,
)
def test_a_stopped_rank_does_not_hide_those_that_it_asks(run_watched):
    [relay, below], *_ = [part for part in branches(range(1, 12)) if len(part) > 1]
    printed = run_watched(12, f"{relay}:SIGSTOP", f"{below}:stay_away").failed()
    assert re.search(rf"s for ranks {relay}, {below} in allreduce\('loss'\)", printed)
    assert "in stay_away" in printed
    assert "no answer, the process is stopped (SIGSTOP, or a debugger)" in printed
    assert "The job ends now: the limit is 3 s" in printed


@pytest.mark.fault(
    "ranks wait for each other on different process sets",
    ENDS.format("each rank with its operation"),
    within=15,
)
def test_ranks_of_sets_that_wait_for_each_other_are_told_apart(run_watched):
    printed = run_watched(3, "sets_that_wait_for_each_other").failed()
    for waits, missing in (0, "rank 1"), (1, "rank 2"), (2, "ranks 0, 1"):
        said = rf"keras_dist: rank {waits} of 3 has waited \d+ s for {missing} in barrier\."
        assert re.search(said, printed)
    assert ", waiting in barrier of ranks 1, 2:" in printed


@pytest.mark.fault(
    "a rank of another node does not arrive", ENDS.format("with its stack"), within=15
)
def test_two_nodes_talk_as_one(run_watched):
    printed = run_watched(4, "3:stay_away", MPIR_CVAR_NUM_CLIQUES="2").failed()
    assert re.search(r"ranks 0, 1, 2 of 4 have waited \d+ s for rank 3 in", printed)
    assert "in stay_away" in printed


@pytest.mark.fault(
    "a rank is stopped (SIGSTOP) while shared memory is created",
    ENDS.format("without a stack") + "; no file is left in `/dev/shm`",
    within=15,
)
def test_a_rank_is_stopped_while_memory_is_made(run_watched):
    run_watched(2, "stop_while_memory_is_made").failed("The job ends now: the limit is 3 s")


@pytest.mark.fault(
    "a rank is stopped (SIGSTOP) while others are at the end of the script",
    ENDS.format("without a stack"),
    within=15,
)
def test_a_rank_is_stopped_when_others_are_at_the_end(run_watched):
    printed = run_watched(3, "stop_when_others_are_at_the_end").failed()
    assert "ranks 1, 2 of 3 have waited" in printed
    assert "for rank 0 in the end of the script" in printed
    assert "The job ends now: the limit is 3 s" in printed


def test_a_job_that_is_slow_but_fine_says_nothing(run_watched):
    assert run_watched(3, "be_slow_in_turn", period=4, limit=4).succeeded() == ""


@pytest.mark.fault(
    "a rank computes for a long time while others are at the end of the script, also in a call "
    "that holds the interpreter lock",
    CONTINUES.format("with its stack if it can answer") + ", also beyond the limit",
    within=20,
)
def test_a_rank_at_work_is_waited_for_at_the_end(run_watched):
    printed = run_watched(3, "work_while_others_are_at_the_end", limit=2).succeeded()
    assert "written" in printed
    said = r"ranks 1, 2 of 3 have waited \d+ s for rank 0 in the end of the script"
    assert re.search(said, printed)
    assert "in write_results" in printed
    assert "or in a call that holds Python's interpreter lock" in printed
    assert "The job ends" not in printed


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_rank_that_is_stuck_is_told_of_while_others_are_at_the_end(run_watched, stuck):
    printed = run_watched(2, "be_stuck_at_the_end", stuck, limit=2).failed()
    assert "ranks 0, 1 of 2 have waited" in printed
    assert "data of each other in a transfer" in printed
    assert "The job ends now: the limit is 2 s" in printed


def test_names_that_never_meet_end_at_the_limit_where_a_thread_might_still_call(run_watched):
    printed = run_watched(2, "names_that_never_meet", limit=2).failed()
    for rank in range(2):
        assert f"waiting in allreduce('loss of {rank}') of ranks 0, 1:" in printed
    assert "The job ends now: the limit is 2 s" in printed


def test_what_is_queued_is_watched_and_the_watch_ends_with_shutdown(run_watched):
    printed = run_watched(2, "queue_and_shut_down", limit=0).succeeded()
    assert re.search(r"keras_dist: rank 0 of 2 has waited \d+ s for rank 1 in", printed)


@pytest.mark.fault(
    "a rank does not arrive, below `MPI_THREAD_MULTIPLE`",
    "each rank reports its operation but not the missing rank; at the limit the job ends",
    within=15,
)
def test_where_mpi_takes_one_thread_at_a_time_each_rank_speaks_for_itself(run_watched):
    printed = run_watched(2, "1:stay_away", limit=2, MPI4PY_RC_THREAD_LEVEL="serialized").failed()
    assert "s for others in allreduce('loss'). Which of them is missing is not" in printed
    assert "The job ends now: the limit is 2 s" in printed


@pytest.mark.fault(
    "`KERAS_DIST_*` settings differ", "an error on every rank that names the variable", within=5
)
def test_settings_must_be_alike(run_watched):
    printed = run_watched(2, "settings_differ").failed()
    assert "Expected KERAS_DIST_STALL_SECONDS=1 as on rank 0. Received: 7." in printed


def test_a_forked_child_has_no_watch(run_watched):
    run_watched(2, "fork").succeeded()


@pytest.mark.fault(
    "one rank is stopped and another does not arrive, under Open MPI",
    ENDS.format("the latter with its stack"),
    within=15,
)
def test_under_open_mpi(run_watched, open_mpi):
    printed = run_watched(3, "1:stay_away", "2:SIGSTOP", python=open_mpi).failed()
    assert "keras_dist: rank 0 of 3 has waited" in printed
    assert "s for ranks 1, 2 in allreduce('loss')" in printed
    assert "in stay_away" in printed
    assert "no answer, the process is stopped" in printed


# --- The state of a rank in training


def test_a_difference_names_the_places_in_training(run_watched):
    printed = run_watched(2, "differ_in_training").stdout
    first, second = printed.splitlines()
    assert "Rank 0 is in fit, epoch 3, update 5, rank 1 in fit, epoch 3, update 4. C" in first
    assert "Rank 0 is" not in second
