"""A job that is killed within an epoch and restarted ends like an uninterrupted one."""

import pytest
import resume

AS_UNINTERRUPTED = "of a run that nothing interrupted, to the bit"


@pytest.mark.fault(
    "a rank is killed within an epoch, twice, under `keras-dist run --max-restarts`, with "
    "`EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint` and `CSVLogger`",
    f"the job ends with the weights, checkpoints, CSV file and history {AS_UNINTERRUPTED}",
    within=120,
)
@pytest.mark.fault(
    "the same, with a warmup and with a callback of the user's that sets the rate at batches",
    f"no rate is set for skipped batches; the job ends with the weights {AS_UNINTERRUPTED}",
    within=120,
)
def test_a_fit_goes_on_within_an_epoch():
    expected = resume.run("jax", 2, "epoch")  # which starts fastest
    assert {"best.weights.h5", "log.csv"} < expected["files"].keys()
    found = resume.run("jax", 2, "2", (1, 3, 1), (3, 0, 0))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("backend", resume.BACKENDS)
def test_twenty_kills_on_each_backend(backend):
    assert resume.main(["--backends", backend]) == 0
