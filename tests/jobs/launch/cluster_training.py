"""What ranks do in the workers of Dask, Ray and Spark."""

import os

from start_jobs import BARE, lean_variables

ENVIRONMENT = lean_variables(KERAS_BACKEND="torch")


def train():
    import keras
    import numpy as np

    import keras_dist

    keras_dist.init()
    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    data = keras_dist.data.shard((x, x.sum(1, keepdims=True)), batch_size=8)
    model.fit(data, epochs=1, callbacks=keras_dist.callbacks())
    return keras_dist.rank(), keras_dist.size(), model.get_weights()[0].tolist()


def join():
    """Joins the other ranks without a framework."""
    exec(BARE, {})
    import keras_dist

    keras_dist.init()


def fail(end):
    """Has rank 1 end while the other one waits."""
    import keras_dist

    if keras_dist.rank() == 0:
        keras_dist.barrier()
    elif end == "raises":
        raise ValueError("broken on purpose")
    elif end == "is killed":
        os.kill(os.getpid(), 9)
    elif end == "loses its worker":
        os.kill(os.getppid(), 9)


def join_and_fail(end):
    join()
    fail(end)
