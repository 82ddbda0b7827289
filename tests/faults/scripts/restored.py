"""Training of a GAN that goes on from a backup in a restarted job."""

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from faults import die, run, tell
from fits import At, rank

import keras_dist

ours: Any = keras_dist.callbacks


def train(*callbacks: Any) -> Any:
    from gans import TwoOptimizers  # type: ignore[import-not-found]  # of tests/ranks

    keras.utils.clear_session()
    keras.utils.set_random_seed(7 + rank)
    x = np.random.default_rng(rank).standard_normal((24, 6)).astype("float32")
    model = TwoOptimizers(seed=None)
    adams = [keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)) for _ in range(2)]
    model.compile(*adams)
    model.fit(x, batch_size=4, epochs=4, verbose=0, callbacks=ours(*callbacks))
    return model.get_weights()


def gan(backup: str) -> None:
    """The first run dies; the second compares with an uninterrupted fit."""
    is_first = os.environ["KERAS_DIST_RESTART"] == "0"
    dying = At({("batch end", 2, 4): die} if is_first else {}, on=1)
    found = train(ours.BackupAndRestore(Path(backup), save_freq=4), dying)
    assert dying.epochs == [2, 3]
    for one, other in zip(found, train(), strict=True):
        assert (one == other).all()
    tell("the weights of an uninterrupted fit")


run(globals())
