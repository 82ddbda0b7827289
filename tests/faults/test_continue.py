"""Training continues with the remaining ranks: Open MPI 5 with ULFM."""

import pytest


@pytest.mark.parametrize("way", ["copy", "mpi"])
@pytest.mark.fault(
    "two of four ranks are killed, one after the other, with `on_failure=continue`",
    "each step is reduced over the remaining ranks, and none is lost; equal results, exit code 0",
    within=20,
)
def test_two_of_four_die(go_on, way):
    printed = go_on(4, "survivors.py", "at_two_steps", KERAS_DIST_REDUCE=way).succeeded()
    assert f"sums {[15] * 4 + [13] * 5 + [9] * 5}" in printed
    assert "keras_dist: rank 1 has died. 3 of 4 ranks continue" in printed
    assert "keras_dist: rank 1 has died. 2 of 3 ranks continue" in printed


@pytest.mark.fault(
    "a rank is killed while another keeps a shared result, with `on_failure=continue`",
    "the result is unchanged; the remaining ranks continue",
    within=20,
)
def test_ranks_die_while_another_keeps_what_it_was_lent(go_on):
    printed = go_on(6, "survivors.py", "while_another_keeps_results").succeeded()
    for left in 5, 4, 3:
        died = f"keras_dist: rank {left} has died. {left} of {left + 1} ranks continue"
        assert died in printed


def test_what_a_script_writes_or_passes_wrongly_is_not_what_others_catch_up_with(go_on):
    go_on(2, "survivors.py", "nobody").succeeded()


@pytest.mark.short
@pytest.mark.fault(
    "a rank is killed while shared memory is created, with `on_failure=continue`",
    "the remaining ranks continue; no file is left in `/dev/shm`",
    within=15,
)
@pytest.mark.fault(
    "the root is killed while others wait for its broadcast, with `on_failure=continue`",
    "the next rank becomes the root and sends its value",
    within=15,
)
def test_ranks_die_while_memory_is_made_and_in_a_broadcast(go_on):
    go_on(4, "survivors.py", "while_memory_is_made_and_in_a_broadcast").succeeded()


@pytest.mark.fault(
    "a rank is killed while another has joined without data, with `on_failure=continue`",
    "the remaining ranks reduce and join as before",
    within=15,
)
@pytest.mark.fault(
    "a rank is killed while others are at the end of the script, with `on_failure=continue`",
    "the remaining ranks end with exit code 0",
    within=15,
)
def test_ranks_die_while_another_has_joined_and_at_the_end(go_on):
    printed = go_on(4, "survivors.py", "while_another_has_joined").succeeded()
    assert "rank 2 has died. 3 of 4 ranks continue" in printed
    assert "rank 1 has died" in printed
    assert "Exception ignored" not in printed


@pytest.mark.fault(
    "a rank is killed during the last reduction, which two other ranks have completed and one has "
    "not, with `on_failure=continue`",
    "the one receives the result from the two; equal results",
    within=15,
)
def test_a_rank_dies_when_it_has_been_waited_for(go_on):
    go_on(4, "survivors.py", "when_it_has_been_waited_for").succeeded()


@pytest.mark.fault(
    "a rank is killed while others are at the end of the script, without `on_failure=continue` "
    "and with an MPI library that supports it",
    "the job ends with the reason, exit code not 0",
    within=15,
)
def test_a_rank_dies_when_others_are_at_the_end(go_on):
    printed = go_on(3, "survivors.py", "at_the_end", KERAS_DIST_ON_FAILURE="stop").failed()
    assert "rank 1 has died" in printed
    assert "Exception ignored" not in printed


@pytest.mark.fault(
    "a rank is killed in a job with process sets, with `on_failure=continue`",
    "the job ends; the error says that process sets are not supported",
    within=15,
)
def test_process_sets_cannot_go_on(go_on):
    printed = go_on(3, "survivors.py", "with_process_sets").failed()
    assert "Expected no process sets where the job continues" in printed


@pytest.mark.fault(
    "only one rank requests `on_failure=continue`",
    "an error on every rank that names both calls",
    within=10,
)
@pytest.mark.parametrize("ready", [0, 1])
def test_one_rank_alone_is_ready_for_deaths(go_on, ready):
    settings = {"KERAS_DIST_ON_FAILURE": "stop", "KERAS_DIST_STALL_ABORT_SECONDS": "8"}
    printed = go_on(2, "survivors.py", "one_rank_is_ready", ready, **settings).failed()
    assert "on_failure=continue" in printed
    assert "Received: " in printed
    assert "The job ends now" not in printed


@pytest.mark.fault(
    "a rank is killed and another does not take part in the recovery, with `on_failure=continue`",
    "at the limit (here 4) the job ends",
    within=15,
)
def test_another_does_not_come_to_go_on(go_on):
    limits = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "4"}
    printed = go_on(3, "survivors.py", "another_does_not_come", **limits).failed()
    assert "[rank 0 of 3] has waited" in printed
    assert "a rank has died and the others have not recovered yet" in printed
    assert "The job ends now: the limit is 4 s" in printed


@pytest.mark.fault(
    "a rank raises, with `on_failure=continue`",
    "its error ends the job: errors of the script are not continued",
    within=10,
)
def test_an_error_is_no_death(go_on):
    go_on(3, "survivors.py", "one_raises").failed("[1] ValueError: broken on purpose")


@pytest.mark.fault(
    "a rank is killed with `on_failure=continue`, which the MPI library does not support",
    "a warning with the remedy at the start; then the job ends",
    within=5,
)
def test_mpi_that_cannot_go_on_is_said_at_the_start(job):
    printed = job(2, "survivors.py", "without_support", KERAS_DIST_ON_FAILURE="continue").failed()
    assert "cannot continue without a rank that dies: only Open MPI 5 or newer can" in printed
    assert "keras-dist run --max-restarts" in printed


CONTINUES = (
    "training continues, and all data is distributed over the remaining ranks; equal weights"
)
PLACES = {
    "broadcast": "a rank is killed during the broadcast",
    "checkpoint": "the root is killed during the write of a checkpoint",
    "batch": "the root is killed during an epoch",
    "validation": "a rank is killed during validation",
}


def case(backend, *places, marks=()):
    texts = [f"{PLACES[place]} of `fit`, with `on_failure=continue`" for place in places]
    rows = [pytest.mark.fault(text, CONTINUES, within=60) for text in texts]
    return pytest.param(backend, ", ".join(places), marks=[*rows, *marks])


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        case("jax", "broadcast", "checkpoint"),
        case("tensorflow", "batch", "validation", marks=[pytest.mark.slow]),
    ],
)
def test_fit_goes_on(ulfm_job, backend, kills):
    ended = ulfm_job(4, "surviving_fit.py", "at", kills, KERAS_BACKEND=backend)
    assert ended.returncode == 0, ended.stdout
    assert "ended 2 96" in ended.stdout
    assert ended.stdout.count("Epoch 4/4") == 1
    died = [line for line in ended.stdout.splitlines() if "has died" in line]
    assert ["3 of 4 ranks continue" in died[0], "2 of 3 ranks continue" in died[1]] == [True, True]


@pytest.mark.slow
@pytest.mark.fault(
    "a rank is killed within a round of local steps, with `on_failure=continue`",
    "the remaining ranks average what they have; equal weights",
    within=60,
)
@pytest.mark.fault(
    "a rank is killed in `fit` with `on_failure=continue`, and fewer are left than the job needs "
    "(`--min-np`)",
    "the job ends at the begin of the next epoch with the reason, exit code not 0",
    within=15,
)
def test_ranks_die_in_rounds_of_local_steps_until_they_are_too_few(ulfm_job):
    how = {"KERAS_BACKEND": "jax", "KERAS_DIST_MIN_NP": "2"}
    printed = ulfm_job(4, "surviving_fit.py", "until_they_are_too_few", **how).failed()
    assert "3 of 4 ranks continue" in printed and "2 of 3 ranks continue" in printed
    assert "ended 3" in printed and "ended 2" in printed
    assert "at least 2 ranks (--min-np). Received: 1: others have died" in printed


@pytest.mark.fault(
    "the root is killed while a client watches the job, with `on_failure=continue`",
    "the next root serves the remaining ranks",
    within=15,
)
def test_the_next_root_is_watched(go_on, tmp_path):
    go_on(3, "survivors.py", "watched_root", XDG_RUNTIME_DIR=str(tmp_path)).succeeded()
    assert not list((tmp_path / "keras_dist").iterdir())
