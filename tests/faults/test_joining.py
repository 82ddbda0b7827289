"""Ranks join a job between two steps: in the place of those that died, or besides the others."""

import collections
import json
import random
import time

import pytest
from endings import SCRIPTS

SETTINGS = "kills starts later refuses on_failure".split()
# A script without a file, as of `python -c`.
AS_TEXT = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import growing_fit"


@pytest.fixture
def fit(request, job, tmp_path):
    """A function that runs `growing_fit.py` on n ranks, with settings of the script; see `job`."""

    def run(ranks, size, backend="torch", as_text=False, **settings):
        given = {name: settings.pop(name) for name in SETTINGS if name in settings}
        start, how = job, {"KERAS_DIST_JOIN_DIRECTORY": str(tmp_path / "job")}
        if "on_failure" in given:
            start, how = request.getfixturevalue("ulfm_job"), {}
        script = ["-c", AS_TEXT] if as_text else ["growing_fit.py"]
        how |= {"timeout": 420, "KERAS_BACKEND": backend, **settings}
        return start(ranks, *script, json.dumps({"size": size, **given}), **how)

    return run


def left_out(tmp_path):
    """Returns the number of samples that no rank has trained on, by epoch; none is used twice."""
    counts = collections.defaultdict(collections.Counter)
    for path in tmp_path.glob("job-0/samples-*"):
        for line in path.read_text().splitlines():
            epoch, samples = json.loads(line)
            counts[epoch].update(samples)
    assert all(count == 1 for epoch in counts.values() for count in epoch.values())
    return {epoch: 96 - len(count) for epoch, count in counts.items() if len(count) < 96}


def codes(tmp_path, count):
    """Returns the exit codes of the processes that were to join, ascending."""
    path, end = tmp_path / "job-0" / "codes", time.monotonic() + 10
    while len(found := path.read_text().split() if path.exists() else []) < count:
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return sorted(map(int, found))


REPLACED = (
    "the others complete the step, and a new rank joins them between two steps; equal weights, and "
    "each sample once an epoch: the others take over the batch of that step"
)


@pytest.mark.fault(
    "a rank is killed in an epoch of `fit`, with `on_failure=replace`", REPLACED, within=180
)
def test_a_rank_is_replaced(fit, tmp_path):
    ended = fit(3, 3, kills=[[1, 3, 1]], later=1, on_failure="replace", as_text=True)
    assert ended.returncode == 0, ended.stdout
    assert "rank 1 has died" in ended.stdout and "1 rank has joined" in ended.stdout
    assert "ended 3" in ended.stdout
    assert left_out(tmp_path) == {}


@pytest.mark.slow
def test_a_rank_that_has_trained_on_its_batch_is_replaced(fit, tmp_path):
    kills = [[1, 3, 1, "trained"]]
    ended = fit(3, 3, kills=kills, later=1, on_failure="replace")
    assert ended.returncode == 0, ended.stdout
    assert "1 rank has joined" in ended.stdout and left_out(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.fault(
    "the root and another rank are killed in the same step of `fit`, with `on_failure=replace`",
    "both are replaced, one after the other; the next rank becomes the root",
    within=180,
)
def test_two_ranks_are_replaced(fit):
    kills = [[0, 2, 0], [0, 2, 2]]
    ended = fit(3, 3, kills=kills, later=0, on_failure="replace", backend="jax")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("1 rank has joined") == 2
    assert "ended 3" in ended.stdout


@pytest.mark.slow
@pytest.mark.fault(
    "a rank that has replaced another is killed, with `on_failure=replace`",
    "the job ends with the reason, exit code not 0: Open MPI does not survive it",
    within=15,
)
def test_the_death_of_a_replacement_ends_the_job(fit):
    kills = [[0, 2, 1], [-1, 1, "joined"]]
    ended = fit(3, 3, kills=kills, on_failure="replace", backend="jax")
    assert ended.returncode != 0
    assert "1 rank has joined" in ended.stdout
    assert "ranks that were started to replace others to live on" in ended.stdout


@pytest.mark.slow
@pytest.mark.fault(
    "a rank is killed while a replacement of another is on its way, with `on_failure=replace`",
    "the job ends with the reason, exit code not 0",
    within=60,
)
@pytest.mark.parametrize("second", [0, 2])  # the root, and another rank
def test_a_death_before_the_replacement_has_joined_ends_the_job(fit, second):
    kills = [[0, 2, 1], [0, 5, second]]
    ended = fit(3, 3, kills=kills, on_failure="replace", backend="jax")
    assert ended.returncode != 0
    assert "a process that replaces a rank to join before another rank dies" in ended.stdout


@pytest.mark.fault(
    "the job has ended before a process that replaces a rank is ready, with `on_failure=replace`",
    "that process ends as well, without an error",
    within=60,
)
def test_a_replacement_that_comes_too_late_leaves(job, open_mpi):
    printed = job(1, "late_replacement.py", python=open_mpi).succeeded()
    assert "disconnected" in printed and "initialized" not in printed
    assert "Traceback" not in printed


JOINED = "it joins between two steps; equal weights on all ranks, and each sample once an epoch"


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.slow), "torch"])
@pytest.mark.fault("a process joins a job in `fit`", JOINED, within=180)
def test_a_process_joins(fit, tmp_path, backend):
    ended = fit(2, 3, starts=[{}], backend=backend)
    assert ended.returncode == 0, ended.stdout
    assert "ended 3" in ended.stdout and codes(tmp_path, 1) == [0]
    assert left_out(tmp_path) == {}


@pytest.mark.fault(
    "a process with other settings wants to join a job in `fit`, and two others with the same",
    "it ends with the reason, and the two join",
    within=180,
)
def test_a_process_with_other_settings_is_refused(fit, tmp_path):
    ended = fit(2, 4, starts=[{"KERAS_DIST_BUCKET_NBYTES": "5"}, {}, {}], backend="jax")
    assert ended.returncode == 0, ended.stdout
    assert "KERAS_DIST_BUCKET_NBYTES 5, where the job has 0" in ended.stdout
    assert "ended 4" in ended.stdout and codes(tmp_path, 3) == [0, 0, 1]


@pytest.mark.fault(
    "two processes want to join a job of two ranks that takes at most three (`--max-np`)",
    "one joins, the other ends with the reason",
    within=180,
)
def test_more_ranks_than_the_job_takes_are_refused(fit, tmp_path):
    how = {"refuses": True, "backend": "jax", "KERAS_DIST_MAX_NP": "3"}
    ended = fit(2, 3, starts=[{}, {}], **how)
    assert ended.returncode == 0, ended.stdout
    assert "ended 3" in ended.stdout and codes(tmp_path, 2) == [0, 1]
    assert "a job that takes at most 3 ranks (--max-np)" in ended.stdout


@pytest.mark.slow
@pytest.mark.fault(
    "a rank is killed in `fit`, and fewer are left than the job needs (`--min-np`)",
    "the job ends with the reason, exit code not 0",
    within=15,
)
def test_a_job_with_too_few_ranks_ends(fit):
    how = {"on_failure": "replace", "backend": "jax", "KERAS_DIST_MIN_NP": "3"}
    ended = fit(3, 3, kills=[[0, 2, 1]], **how)
    assert ended.returncode != 0
    assert "at least 3 ranks (--min-np). Received: 2: others have died" in ended.stdout


@pytest.mark.slow
def test_a_job_that_continues_with_too_few_ranks_ends(fit):
    how = {"on_failure": "continue", "backend": "jax", "KERAS_DIST_MIN_NP": "2"}
    ended = fit(2, 2, kills=[[0, 10, 1]], **how)
    assert ended.returncode != 0
    assert "at least 2 ranks (--min-np). Received: 1: others have died" in ended.stdout


@pytest.mark.slow
@pytest.mark.fault(
    "a rank that has joined a job by `keras-dist join` is killed",
    "all ranks end, exit code not 0",
    within=15,
)
def test_the_death_of_a_rank_that_has_joined_ends_the_job(fit):
    ended = fit(2, 3, starts=[{}], kills=[[-1, 1, "joined"]], backend="jax")
    assert ended.returncode != 0
    assert "rank 2 has died" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_kills_and_joins(fit, tmp_path, seed):
    draw = random.Random(seed)
    backend = draw.choice(["jax", "tensorflow", "torch"])
    if draw.random() < 0.5:
        count = draw.randint(1, 2)
        ended = fit(2, 2 + count, starts=[{}] * count, backend=backend)
        assert codes(tmp_path, count) == [0] * count, ended.stdout
        if backend == "torch":
            assert left_out(tmp_path) == {}
    else:
        ranks = draw.sample(range(3), draw.randint(1, 2))
        kills = [[draw.randint(0, 1), draw.randrange(7), rank] for rank in ranks]
        how = {"kills": kills, "later": 1, "on_failure": "replace", "backend": backend}
        ended = fit(3, 3, **how)
        if ended.returncode != 0:  # the second came before the first was replaced
            assert len(ranks) == 2
            assert "to join before another rank dies" in ended.stdout, ended.stdout
            return
        if backend == "torch":
            assert left_out(tmp_path) == {}
    assert ended.returncode == 0, ended.stdout
    assert "ended" in ended.stdout
