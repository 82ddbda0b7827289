"""Ranks that make different calls all raise an error instead of a deadlock."""

import re

import pytest

ENDS = "an error on every rank that names the rank, what differs and the remedy"


def assert_all_told(ended, ranks, message):
    """Checks that the job failed and that the last line of every rank has the message."""
    assert ended.returncode != 0
    for rank in range(ranks):
        lines = [line for line in ended.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert message in lines[-1], ended.stdout


CALLS = {
    "another operation": (
        "[rank 1 of 2] Expected allreduce('value') as on rank 0. Received: barrier."
    ),
    "another shape": "[rank 1 of 2] Expected 'value' with shape (3,) as on rank 0. Received: (4,).",
    "another dtype": (
        "[rank 1 of 2] Expected 'value' with dtype float32 as on rank 0. Received: float64."
    ),
    "another name": (
        "[rank 1 of 2] Expected name='loss' in allreduce('loss') as on rank 0. Received: name="
    ),
    "another root": "[rank 1 of 2] Expected root_rank=0 in broadcast",
    "a root that is not there": "Expected root_rank to be a rank of this job",
    "a bad argument on one rank": "[rank 1 of 2] Expected value to have a dtype",
}


@pytest.mark.fault(
    "a rank calls with another operation, shape, dtype, name or root", ENDS, within=5
)
def test_a_different_call(job):
    ended = job(2, "calls.py", "different")
    for case, message in CALLS.items():
        told = [line for line in ended.stdout.splitlines() if line.startswith(f"{case}: ")]
        assert len(told) == 2 and all(message in line for line in told), ended.stdout
    assert_all_told(ended, 2, CALLS["another operation"])


@pytest.mark.short
@pytest.mark.fault("a rank trains another model, more layers or other shapes", ENDS, within=10)
@pytest.mark.fault("too few samples for all ranks", "an error on every rank", within=10)
def test_a_different_model(fit_job):
    ended = fit_job("fit_faults.py", "different_models")
    same_model = "Build the same model, with the same optimizer, on every rank."
    assert_all_told(ended, 2, same_model)
    for rank in range(2):
        output = [line for line in ended.stdout.splitlines() if line.startswith(f"{rank}: ")]
        assert same_model in output[0], output
        assert "Expected at least 2 samples" in output[1], output


# --- A rank that has ended


LEFT = (
    "[rank 1 of 2] Expected allreduce('loss') as on rank 0. Received: the end of the script. "
    "Every rank must make the same calls and the same number of steps"
)


@pytest.mark.short
@pytest.mark.fault("a rank ends its script, or calls `sys.exit`, while others wait", ENDS, within=5)
@pytest.mark.parametrize("code", ["0", "3"])
def test_a_rank_that_ends_early(job, code):
    printed = job(2, "calls.py", "end_early", code).failed()
    assert LEFT in printed


@pytest.mark.fault("a rank calls `shutdown` while another ends its script", ENDS, within=5)
def test_a_rank_that_shuts_down_alone(job):
    printed = job(2, "calls.py", "shut_down_alone").failed()
    told = "[rank 1 of 2] Expected the end of the script as on rank 0. Received: shutdown. "
    assert told in printed


@pytest.mark.fault("a rank raises, and its script calls `shutdown` in `finally`", ENDS, within=5)
def test_a_rank_that_shuts_down_after_an_error(job):
    printed = job(2, "calls.py", "shut_down_after_an_error").failed("ValueError: broken on purpose")
    told = "[rank 1 of 2] Expected allreduce('loss') as on rank 0. Received: shutdown. "
    assert told in printed


@pytest.mark.fault("a rank ends while others have queued operations", ENDS, within=5)
def test_a_rank_that_ends_while_others_have_more_queued(job):
    printed = job(2, "calls.py", "end_while_more_is_queued").failed()
    assert LEFT in printed


@pytest.mark.fault(
    "a rank ends while others have queued operations, some with names", ENDS, within=5
)
def test_a_rank_that_ends_while_others_have_queued_named_ones(job):
    printed = job(2, "calls.py", "end_while_named_ones_are_queued").failed()
    assert "[rank 1 of 2] Expected allreduce('value') as on rank 0. Received: the end of" in printed
    assert "RepeatRendezvous" not in printed


@pytest.mark.fault(
    "a rank ends, or calls `shutdown`, while others call a collective of a process set",
    ENDS,
    within=5,
)
@pytest.mark.parametrize(
    ("reduce", "how"),
    [
        ("copy", "the end of the script"),
        ("mpi", "the end of the script"),
        ("copy", "shutdown"),
    ],
)
def test_a_rank_that_ends_while_others_call_on_a_process_set(job, reduce, how):
    printed = job(3, "calls.py", "end_while_a_set_is_used", how, KERAS_DIST_REDUCE=reduce).failed()
    assert (
        f"[rank 2 of 3] Expected allreduce('loss') as on rank 1. Received: {how}. "
        "Every rank must make the same calls"
    ) in printed


@pytest.mark.fault(
    "a rank is in `evaluate` while another is in `fit`",
    "the root logs a warning with the stack after `KERAS_DIST_STALL_SECONDS`; the job continues",
    within=5,
)
@pytest.mark.fault("a rank is in `fit` when another has left training", ENDS, within=5)
@pytest.mark.fault(
    "KeyboardInterrupt in `fit` on one rank, caught by its script",
    "an error on every rank when that rank ends",
    within=5,
)
def test_a_rank_in_evaluate_or_after_training_is_named_as_such(job):
    periods = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "0"}
    printed = job(
        2, "fit_faults.py", "in_evaluate_or_after_training", KERAS_BACKEND="jax", **periods
    ).failed()
    lines = printed.splitlines()
    waited = r"keras_dist: rank 0 of 2 has waited \d+ s for rank 1 in .* \(in fit, epoch 2\)\."
    assert any(re.fullmatch(waited, line) for line in lines)
    there = re.compile(r"Rank 1 \(pid \d+ on .*\), in evaluate within fit, epoch 2:")
    assert any(there.fullmatch(line) for line in lines)
    assert ", in on_test_begin" in printed
    assert "Received: the end of the script. Rank 0 is in fit, epoch 3, rank 1 after" in printed


@pytest.mark.fault(
    "two ranks of a process set make different calls while a third computes",
    "an error on both, and the job ends, exit code not 0",
    within=5,
)
def test_different_calls_on_a_process_set_while_another_rank_computes(job):
    printed = job(3, "calls.py", "different_on_a_set").failed()
    for rank in (0, 1):
        assert f"[{rank}] keras_dist.errors.MismatchError" in printed


@pytest.mark.fault(
    "a rank calls two concurrent operations with the same name",
    "an error on this rank and on ranks that wait for the second; the job can continue",
    within=5,
)
def test_two_operations_of_one_name(job):
    printed = job(2, "calls.py", "twice_the_same_name").succeeded()
    for rank in range(2):
        output = [line for line in printed.splitlines() if line.startswith(f"{rank}: ")]
        assert "[rank 1 of 2] Expected one operation named 'loss' at a time" in output[0], output
        assert output[1] == f"{rank}: (2.0, 6.0)"


@pytest.mark.fault(
    "a rank passes an invalid value, and all ranks catch the error",
    "an error on every rank; the next call succeeds",
    within=20,
)
@pytest.mark.parametrize("face", ["tensorflow", "jax"])
def test_an_invalid_argument_on_one_rank(job, face):
    # In compiled steps as well; tests of all faces have the calls outside of them.
    printed = job(2, "invalid_arguments.py", KERAS_BACKEND=face).succeeded()
    assert printed.count("in step") == 2


@pytest.mark.fault("a host has another version of keras_dist, Python, MPI or numpy", ENDS, within=5)
@pytest.mark.fault(
    "the clock of a host is minutes apart",
    "a warning that names the host; the job continues",
    within=5,
)
def test_another_version_or_clock(job):
    printed = job(2, "calls.py", "unlike_hosts").succeeded()
    # The second one of keras_dist has other settings as well.
    for other in "numpy 1.0", "keras_dist 0.1", "Python 3.9", "MPI MPICH 1.0":
        told = (
            rf"\[rank 1 of 2\] Expected {other.split()[0]} [^,]+ as on rank 0 \(on \S+\)\. "
            rf"Received: {re.escape(other)} \(on \S+\)\. Install the same versions"
        )
        expected = 4 if "keras_dist" in other else 2
        assert len(re.findall(told, printed)) == expected, printed
    assert printed.count("has joined") == 2
    message = (
        r"Expected clocks of all hosts within 60 s of that of \S+\. Received: \+\d+ s on \S+\. "
    )
    assert len(re.findall(message, printed)) == 1
