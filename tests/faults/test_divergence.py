"""Updates that would make replicas diverge without an error."""

import pytest


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
def test_updates_that_were_wrong_without_an_error(job):
    job(2, "updates.py", KERAS_BACKEND="torch").succeeded()
