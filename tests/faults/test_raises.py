"""A rank raises: its traceback is printed once, with its rank, and all ranks end."""

import re

import pytest

ENDS = "the traceback once, marked with the rank; all ranks end, exit code not 0"


def assert_told_once(ended, rank, words):
    """Checks that the job failed, and that the text is in the traceback of one rank only."""
    assert ended.returncode != 0
    lines = [line for line in ended.stdout.splitlines() if words in line]
    last = [line for line in lines if re.match(r"\[\d+\] [\w.]*(Error|Interrupt)\b", line)]
    assert [line.partition(" ")[0] for line in last] == [f"[{rank}]"], ended.stdout


@pytest.mark.short
@pytest.mark.fault("user code raises while others wait in a collective", ENDS, within=5)
def test_user_code_raises(meet):
    assert_told_once(meet(3, "1:fail"), 1, "broken on purpose")


@pytest.mark.fault("user code raises under Open MPI", ENDS, within=5)
def test_user_code_raises_under_open_mpi(meet, open_mpi):
    assert_told_once(meet(3, "1:fail", python=open_mpi), 1, "broken on purpose")


def test_a_rank_that_aborts_goes_no_further(meet):
    """`Abort` of MPICH returns, and the launcher ends the process later."""
    ended = meet(2, "1:fail_although_abort_returns")
    assert_told_once(ended, 1, "broken on purpose")
    assert "[0] " not in ended.stdout, ended.stdout


@pytest.mark.fault("user code raises while others compute, outside Python", ENDS, within=5)
def test_user_code_raises_while_others_compute(meet):
    computes = "hold_lock 60_000_000"
    assert_told_once(meet(3, f"0:{computes}", "1:fail", f"2:{computes}"), 1, "broken on purpose")


@pytest.mark.fault("a rank raises before `keras_dist.init()`", ENDS, within=5)
def test_an_exception_before_init(meet):
    printed = meet(2, "1:fail", "--early").failed()
    assert printed.count("ValueError: broken on purpose") == 1


@pytest.mark.fault("a rank runs out of memory (`RLIMIT_AS`) and raises", ENDS, within=5)
def test_a_rank_without_memory(meet):
    assert_told_once(meet(3, "1:run_out_of_memory"), 1, "MemoryError")


@pytest.mark.fault(
    "a rank runs out of memory in a reduction",
    "the same error on every rank; the job can continue",
    within=15,
)
def test_a_rank_without_memory_within_a_reduction(job):
    printed = job(3, "raising.py", "within_a_reduction").succeeded()
    assert printed.count("Expected every rank to reduce its slice") == 3
    assert printed.count("Received: MemoryError().") == 1
    assert printed.count("Received: an error on another rank.") == 2


@pytest.mark.fault("SIGINT on one rank", f"{ENDS} (130)", within=5)
def test_an_interrupt_of_one_rank(meet):
    ended = meet(3, "1:SIGINT")
    assert_told_once(ended, 1, "KeyboardInterrupt")
    assert ended.returncode == 130


@pytest.mark.fault("a rank raises while others wait for queued operations", ENDS, within=5)
@pytest.mark.parametrize("handles", ["dropped", "kept"])
def test_an_exception_whatever_is_queued(job, handles):
    assert_told_once(job(2, "raising.py", "with_queue", handles), 1, "broken on purpose")


@pytest.mark.fault(
    "a thread of a rank raises instead of calling a collective",
    "its traceback, marked with the rank; when the rank ends, the reason on every rank",
    within=5,
)
def test_an_exception_in_a_thread(job):
    ended = job(2, "raising.py", "in_a_thread")
    assert_told_once(ended, 1, "broken on purpose")
    assert "[1] Exception in thread loader:" in ended.stdout
    assert (
        "[rank 1 of 2] Expected allreduce('loss') as on rank 0. Received: the end" in ended.stdout
    )


@pytest.mark.fault(
    "a `Compressor` raises on one rank of two nodes, within the reduction", ENDS, within=5
)
def test_a_compressor_raises(job):
    ended = job(2, "raising.py", "in_a_compressor", MPIR_CVAR_NUM_CLIQUES="2")
    assert_told_once(ended, 1, "broken on purpose")


# --- In training


@pytest.mark.short
@pytest.mark.fault("a hook of a callback raises in `fit`, not on the root", ENDS, within=5)
def test_a_callback_raises(fit_job):
    ended = fit_job("fit_faults.py", "callback_raises")
    assert_told_once(ended, 1, "broken on purpose")


@pytest.mark.fault(
    "`fit` with a backup trains on data whose order a resumed run cannot restore",
    "one warning before the first step names the data and the remedy",
    within=60,
)
@pytest.mark.fault("a generator of data raises in `fit`", ENDS, within=5)
def test_a_generator_raises(fit_job):
    ended = fit_job("fit_faults.py", "generator_raises")
    told, _, after = ended.stdout.partition("first step")
    assert told.count("a backup does not keep a generator, which is read from the start") == 1
    assert "keras_dist.data.shard(...)" in told and "a backup does not keep" not in after
    assert_told_once(ended, 1, "broken on purpose")


@pytest.mark.fault("a function of a `tf.data` pipeline raises in `fit`", ENDS, within=5)
def test_a_pipeline_raises(job):
    printed = job(2, "fit_faults.py", "pipeline_raises").failed()
    assert "[1] ValueError: broken on purpose" in printed
    assert "[0] " not in printed
