"""Killed training resumes bit for bit: optimizers that are built late, random numbers."""

import os
from pathlib import Path

import numpy as np
import pytest
from endings import end_of


@pytest.mark.fault(
    "a rank is killed in the training of a GAN with two optimizers, each built at its first step",
    "the restarted job builds and restores both; the weights equal those of an uninterrupted run "
    "bit for bit",
    within=120,
)
@pytest.mark.fault(
    "a rank is killed within an epoch of arrays that `fit` shuffles, with `Dropout` without a seed",
    "the random generators of each rank are restored; the weights equal those of an uninterrupted "
    "run bit for bit",
    within=120,
)
def test_late_optimizers_and_random_numbers_go_on(launch, tmp_path):
    modules = [str(Path(__file__).parents[1] / "ranks"), os.environ.get("PYTHONPATH", "")]
    how = {"PYTHONPATH": os.pathsep.join(filter(None, modules)), "KERAS_BACKEND": "torch"}
    found = []
    for dies in (True, False):
        folder = tmp_path / str(dies)
        folder.mkdir()
        words = "restored.py", "gan", folder, dies
        job = launch("-np", 2, "--max-restarts", 1, *words, **how)
        printed = end_of(job, tmp_path)
        assert job.returncode == 0, printed
        assert ("Restart 1 of 1" in printed) == dies
        assert "a backup does not keep" not in printed
        found.append(np.load(folder / "weights.npz"))
    interrupted, whole = found
    for name in whole.files:
        assert (interrupted[name] == whole[name]).all()


@pytest.mark.fault(
    "`fit` with a backup trains on data whose order a resumed run cannot restore",
    "one warning before the first step names the data and the remedy",
    within=60,
)
def test_an_order_that_is_lost_is_said(job):
    printed = job(2, "restored.py", "order").succeeded()
    before, _, after = printed.partition("said nothing")
    assert "a backup does not keep" not in before
    assert after.count("a backup does not keep the order of a tf.data.Dataset") == 1
    assert "keras_dist.data.shard(...)" in after
