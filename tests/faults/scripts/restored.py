"""Training that goes on from backups, and data whose order no backup keeps."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from faults import FOLDER, die, fault, run
from fits import At, build, rank, shard

import keras_dist

ours: Any = keras_dist.callbacks


def gan(where: str, dies: str) -> None:
    from gans import TwoOptimizers  # type: ignore[import-not-found]  # of tests/ranks

    folder = Path(where)
    marker = folder / "died"

    def die_once() -> None:
        if not marker.exists():
            marker.touch()
            die()

    keras.utils.set_random_seed(7 + rank)
    x = np.random.default_rng(rank).standard_normal((24, 6)).astype("float32")
    model = TwoOptimizers(seed=None)
    adams = [keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)) for _ in range(2)]
    model.compile(*adams)
    backup = ours.BackupAndRestore(str(folder / "backup"), save_freq=4)
    dying = [At({("batch end", 2, 4): die_once}, on=1)] if dies == "True" else []
    model.fit(x, batch_size=4, epochs=4, verbose=0, callbacks=ours(backup, *dying))
    if rank == 0:
        np.savez(folder / "weights", *model.get_weights())


def order() -> None:
    import tensorflow as tf

    x = np.random.default_rng(rank).standard_normal((8, 2)).astype("float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    sgd = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(sgd, "mse", run_eagerly=True)
    folder = keras_dist.broadcast_object(tempfile.mkdtemp())

    def fit(data: Any, **options: Any) -> None:
        callbacks = ours(ours.BackupAndRestore(folder))
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks, **options)

    fault()
    pipeline = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    fit(pipeline.batch(4))
    fit(x, y=x[:, :1], shuffle=False)
    print("said nothing", flush=True)
    keras_dist.barrier()
    fit(pipeline.shuffle(8, seed=1).batch(4))


def on_hosts(loses: str) -> None:
    """Trains on two hosts with a backup in memory. The second host may be lost with the root."""
    has_begun_again = os.environ["KERAS_DIST_RESTART"] != "0"

    def wait_for_loss() -> None:
        if loses == "True" and not has_begun_again:
            (FOLDER / "ready").touch()
            time.sleep(100)

    at, model = At({("batch end", 2, 3): wait_for_loss}, on=1), build((8,), dropout=0.2)
    backup = ours.BackupAndRestore("/dev/shm/disk-of-this-host", root_rank=1, memory=True)
    model.fit(shard(48, 4), epochs=4, verbose=0, callbacks=ours(backup, at))
    assert at.epochs[0] >= 2 or not has_begun_again
    if rank == 0:
        np.savez(FOLDER / "weights", *model.get_weights())


run(globals())
