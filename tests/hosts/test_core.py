"""The core of the suite on three hosts, and on two with two ranks each, over TCP."""

import re
from pathlib import Path

import pytest

RANKS = Path(__file__).parents[1] / "ranks"
CONFORMANCE = RANKS / "_engine" / "test_conformance.py"
# MPICH also emulates hosts, in jobs of tests/ranks, which have more programs; Open MPI does not.
NODES = [RANKS / "_engine" / f"test_{name}.py" for name in ("nodes", "collectives")]
FIT = f"{RANKS / 'training' / 'test_optimizer.py'}::test_weights_equal_those_of_one_process[lars]"

CASES = [
    pytest.param("mpich", [CONFORMANCE], 3, 1, id="mpich-3-1"),
    pytest.param(
        "openmpi", [CONFORMANCE, *NODES, FIT], 2, 2, id="openmpi-2-2", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(
    ("python_of_library", "tests", "hosts", "ranks_per_host"),
    CASES,
    indirect=["python_of_library", "hosts"],
)
def test_the_core_of_the_suite(run_on_hosts, python_of_library, ranks_per_host, tests):
    options = ["--color=no", "-q", "-x", "-p", "no:cacheprovider"]
    arguments = (python_of_library, ranks_per_host, "-m", "pytest", *options, *tests)
    job = run_on_hosts(*arguments, KERAS_BACKEND="torch", CONFORMANCE_COUNT="12")
    assert job.returncode == 0, job.stdout
    assert re.search(r"\d+ passed", job.stdout), job.stdout
    # Tests of several nodes are skipped where the ranks believe that they are on one.
    assert not re.search(r"\d+ (failed|skipped)", job.stdout), job.stdout
