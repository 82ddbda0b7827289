"""The core of the suite on two and three hosts with one and two ranks each, over TCP."""

import re
from pathlib import Path

import pytest

SLOW = pytest.mark.slow
PARALLEL = Path(__file__).parents[1] / "parallel"
ENGINE = [
    PARALLEL / "test_collectives.py",
    PARALLEL / "test_nodes.py",
    PARALLEL / "test_rendezvous.py",
]
EQUALITY = [
    f"{PARALLEL / 'test_optimizer.py'}::test_weights_equal_those_of_one_process",
    f"{PARALLEL / 'test_replicas.py'}",
    f"{PARALLEL / 'test_backup.py'}"
    "::test_resumed_training_equals_training_that_was_not_interrupted",
]


# Hosts, MPI library, ranks on each host; all cases run for the slow tests.
FAST = [(2, "mpich", 1), (2, "openmpi", 1)]
CASES = [
    pytest.param(count, library, ranks, marks=[] if (count, library, ranks) in FAST else SLOW)
    for count in (2, 3)
    for library in ("mpich", "openmpi")
    for ranks in (1, 2)
]


@pytest.mark.parametrize(("hosts", "library", "ranks_per_host"), CASES, indirect=["hosts"])
@pytest.mark.parametrize(
    "tests", [ENGINE, pytest.param(EQUALITY, marks=SLOW)], ids=["engine", "equality"]
)
def test_the_core_of_the_suite(run_on_hosts, library, ranks_per_host, tests):
    options = ["--color=no", "-q", "-x", "-p", "no:cacheprovider"]
    job = run_on_hosts(
        library, ranks_per_host, "-m", "pytest", *options, *tests, KERAS_BACKEND="torch"
    )
    assert job.returncode == 0, job.stdout
    assert re.search(r"\d+ passed", job.stdout), job.stdout
    assert not re.search(r"\d+ failed", job.stdout), job.stdout
