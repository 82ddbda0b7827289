"""The outcomes that scripts/peers counts, and its table."""

import pytest
from peers import run

FIRST, SECOND, THIRD = (f"folder/file_test.py::{name}" for name in ("first", "second", "third"))


def lines_of(**outcomes):
    """The records of a job: each test begins, and ends unless its outcome is `None`."""
    lines = []
    for name, outcome in outcomes.items():
        test = f"folder/file_test.py::{name}"
        lines.append({"test": test, "outcome": "began"})
        if outcome:
            lines.append({"test": test, "outcome": outcome, "text": "why"})
    return lines


@pytest.fixture(autouse=True)
def differences(monkeypatch):
    expected = [{"tests": ["file_test.py::third"], "backends": ["jax"], "reason": "on purpose"}]
    monkeypatch.setattr(run, "expected_of", lambda suite: expected)


@pytest.mark.parametrize(
    ("outcomes", "counted"),
    [
        ({"first": "passed", "second": "skipped"}, {FIRST: "passed", SECOND: "skipped"}),
        ({"first": "failed"}, {FIRST: "failed"}),
        ({"first": "passed", "second": "failed"}, {FIRST: "passed"}),  # again, as the first
        ({"first": "passed", "second": None}, {FIRST: "passed"}),
        ({"first": None}, {FIRST: "failed"}),  # the job ended within it
        ({"first": "passed", "third": "failed"}, {FIRST: "passed", THIRD: "failed"}),
    ],
)
def test_a_failure_counts_if_it_is_expected_or_the_first_of_the_job(outcomes, counted):
    found = run.settled("keras", "jax", lines_of(**outcomes), "output")
    assert {test: outcome for test, (outcome, _) in found.items()} == counted


def test_a_job_goes_on_after_the_failure_of_another_job(monkeypatch):
    jobs = [
        (lines_of(first="passed", second="failed"), 1),
        (lines_of(second="failed"), 1),
        (lines_of(third="passed"), 0),
    ]
    given = []

    def run_job(suite, source, files, backend, done, limit):
        given.append([*done])
        return *jobs[len(given) - 1], "output"

    monkeypatch.setattr(run, "run_job", run_job)
    outcomes = {}
    for found, _ in run.run_files("keras", None, ["folder/file_test.py"], "torch", 1):
        outcomes |= {test: outcome for test, (outcome, _) in found.items()}
    assert outcomes == {FIRST: "passed", SECOND: "failed", THIRD: "passed"}
    assert [done[-2:] for done in given[1:]] == [[*given[0][-1:], FIRST], [FIRST, SECOND]]
