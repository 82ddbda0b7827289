"""A job that is killed within an epoch and restarted ends like an uninterrupted one."""

import pytest
import resume

EQUAL = "equal those of an uninterrupted run bit for bit"


@pytest.mark.fault(
    "a rank is killed in `fit`, under `keras-dist run --max-restarts`",
    "the job restarts from the last backup; the weights equal those of an uninterrupted run bit "
    "for bit",
    within=120,
)
@pytest.mark.fault(
    "a rank is killed within an epoch, twice, under `keras-dist run --max-restarts`, with "
    "`BatchNormalization`, `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint` and `CSVLogger`",
    f"weights, checkpoints, CSV file and history {EQUAL}",
    within=120,
)
@pytest.mark.fault(
    "the same with a warmup and with a user's callback that sets the learning rate at batches",
    f"no learning rate is set for skipped batches; the weights {EQUAL}",
    within=120,
)
def test_a_fit_goes_on_within_an_epoch():
    expected = resume.run("jax", 2, "epoch")  # which starts fastest
    assert {"best.weights.h5", "log.csv"} < expected["files"].keys()
    found = resume.run("jax", 2, "2", (1, 3, 1), (3, 0, 0))
    assert found == expected
