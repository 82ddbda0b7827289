"""Training that goes on from a backup in another job: of a GAN, and with sharded state."""

import contextlib
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from faults import break_down, die, run, tell
from fits import At, build, fit, rank, shard

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


def resharded(folder: str, how: str) -> None:
    """Fits with whole and with sharded state; they end early, the second one by a death, or go on.

    The second job has other ranks, whose slices of the state are others.
    """
    found = []
    for is_sharded, end in (False, break_down), (True, die):
        model = build((301,))
        adam = keras.optimizers.Adam(0.01)
        model.compile(keras_dist.DistributedOptimizer(adam, shard_state=is_sharded), "mse")
        backup = ours.BackupAndRestore(Path(folder, str(is_sharded)), save_freq=2)
        at = At({("batch end", 0, 6): end} if how == "ends" else {}, on=1 if is_sharded else None)
        with contextlib.suppress(ValueError):
            fit(backup, at, data=shard(batch_size=4), model=model)
        found.append(model.get_weights())
    assert at.steps == [(0, 6), (0, 7), *((1, batch) for batch in range(8))]
    for whole, sharded in zip(*found, strict=True):
        assert (whole == sharded).all()
    tell("the weights of a fit with whole state")


run(globals())
