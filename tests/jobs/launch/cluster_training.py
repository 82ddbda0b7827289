"""The training that Dask and Spark run on their workers."""

import os

from start_jobs import lean_variables

ENVIRONMENT = lean_variables(KERAS_BACKEND="torch")


def train(end="returns"):
    import keras_dist

    keras_dist.init()
    if keras_dist.rank() == 1 and end == "raises":
        raise ValueError("broken on purpose")
    if keras_dist.rank() == 1 and end == "is killed":
        os.kill(os.getpid(), 9)
    if keras_dist.rank() == 1 and end == "loses its worker":
        os.kill(os.getppid(), 9)
    import keras
    import numpy as np

    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    data = keras_dist.data.shard((x, x.sum(1, keepdims=True)), batch_size=8)
    model.fit(data, epochs=1, callbacks=keras_dist.callbacks())
    return keras_dist.rank(), keras_dist.size(), model.get_weights()[0].tolist()
