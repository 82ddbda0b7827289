"""Divergent replicas are detected at the end of a fit and before a checkpoint is written."""

import pytest


@pytest.mark.short
@pytest.mark.fault(
    "the weights of one rank differ, at the end of a fit or before a checkpoint",
    "an error on every rank that names variables and ranks; nothing is written",
    within=60,
)
def test_divergent_replicas_are_found(fit_job):
    fit_job("backups.py", "replicas_diverge").succeeded()


@pytest.mark.fault(
    "Keras applies updates without the method that reduces gradients, as after a renaming in Keras",
    "a `BackendError` on every rank, in that step; replicas do not diverge",
    within=60,
)
@pytest.mark.fault(
    "float8 layers have inputs of different magnitudes on each rank",
    "scales and histories are those of all ranks; replicas stay equal",
    within=60,
)
def test_updates_outside_of_the_reduction(job):
    job(2, "updates.py", "outside_of_the_reduction").succeeded()


@pytest.mark.fault(
    "an average of integers whose sum does not fit their dtype",
    "the exact average, rounded towards zero",
    within=60,
)
@pytest.mark.fault(
    "on torch no rank has a gradient of a weight, with weight decay and momentum",
    "the weight stays as it is",
    within=60,
)
def test_what_was_wrong_without_an_error(job):
    job(2, "updates.py", "without_an_error", KERAS_BACKEND="torch").succeeded()
