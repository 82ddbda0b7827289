"""A job that is killed within an epoch and restarted ends like an uninterrupted one."""

import os
from pathlib import Path

import pytest
import resume
from endings import end_of

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


@pytest.mark.fault(
    "a rank is killed in the training of a GAN with two optimizers, each built at its first step",
    f"the restarted job builds and restores both; the weights {EQUAL}",
    within=120,
)
@pytest.mark.fault(
    "a rank is killed within an epoch of arrays that `fit` shuffles, with `Dropout` without a seed",
    f"the random generators of each rank are restored; the weights {EQUAL}",
    within=120,
)
def test_late_optimizers_and_random_numbers_go_on(launch, tmp_path):
    modules = [str(Path(__file__).parents[1] / "ranks"), os.environ.get("PYTHONPATH", "")]
    how = {"PYTHONPATH": os.pathsep.join(filter(None, modules)), "KERAS_BACKEND": "torch"}
    words = "-np", 2, "--max-restarts", 1, "restored.py", "gan", tmp_path / "backup"
    job = launch(*words, **how)
    printed = end_of(job, tmp_path)
    assert job.returncode == 0, printed
    assert "Restart 1 of 1" in printed
    assert "a backup does not keep" not in printed
    assert printed.count("the weights of an uninterrupted fit") == 2


def test_sharded_state_goes_on_after_a_death_on_another_number_of_ranks(job, tmp_path):
    words = "restored.py", "resharded", tmp_path / "backups"
    job(2, *words, "ends", KERAS_BACKEND="jax").failed()  # which starts fastest
    printed = job(3, *words, "goes on", KERAS_BACKEND="jax").succeeded()
    assert printed.count("The backup was written by 2 ranks") == 2
    assert printed.count("the weights of a fit with whole state") == 3
