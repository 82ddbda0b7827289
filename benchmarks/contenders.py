"""Who trains in the benchmark of fit, on every rank: contenders, their models, their data."""

import contextlib
import time

import numpy as np
from ranks import barrier, everyones, total

from keras_dist.launch.microbench import in_turn

BATCH = 128
WARM_STEPS = 4
ALONE = ("none", "together", "torch")  # they average nothing


def time_fits(task):
    """Returns images/s of all ranks together, for each contender and round."""
    from keras_dist import runtime

    steps = WARM_STEPS + task["steps"]
    data = synthetic(steps)
    makers = {name: maker(name, task["task"]) for name in task["contenders"]}
    models = {name: make() for name, (make, _) in makers.items()}

    def images(name):
        with makers[name][1]():
            barrier()
            clock = make_clock(steps)
            callbacks = [make_barrier(), clock] if name == "together" else [clock]
            models[name].fit(*data, batch_size=BATCH, epochs=1, verbose=0, callbacks=callbacks)
        return total(task["steps"] * BATCH / clock.seconds)

    for name in models:
        images(name)
    found = in_turn(models, task["rounds"], images)
    if runtime.size() > 1:
        check_equal({name: models[name] for name in models if name not in ALONE})
    return found


def maker(name, model):
    """Returns a function that makes a contender's model, and the context it trains in."""
    import keras

    import keras_dist

    def plain():
        return compiled(model, keras.optimizers.SGD(0.01))

    def ours():
        return compiled(model, keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)))

    def naive():
        return compiled(model, naive_sgd(0.01))

    def loop():
        from torch_loop import Loop

        return Loop(model, averages=name == "ddp")

    if name == "parallel":
        from data_parallel import data_parallel

        return data_parallel(plain)
    makers = {
        "none": plain,
        "together": plain,
        "ours": ours,
        "naive": naive,
        "torch": loop,
        "ddp": loop,
    }
    return makers[name], contextlib.nullcontext


def compiled(name, optimizer):
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    if name == "cnn":
        stack = [
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ]
    else:
        stack = [layers.Flatten(), *(layers.Dense(2048, activation="relu") for _ in range(3))]
    model = keras.Sequential([keras.Input((28, 28)), *stack, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    return model


def naive_sgd(rate):
    """Returns an SGD that averages its gradients one by one, as a first attempt would."""
    import keras
    import tensorflow as tf
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def average(gradient):
        out = np.empty_like(gradient)
        world.Allreduce(gradient, out)
        return out / np.float32(world.size)

    class NaiveSGD(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            averaged = []
            for gradient in grads:
                averaged.append(tf.numpy_function(average, [gradient], gradient.dtype))
                averaged[-1].set_shape(gradient.shape)
            return super()._clip_gradients(averaged)

    return NaiveSGD(rate)


def synthetic(steps):
    from keras_dist import runtime

    random = np.random.default_rng(runtime.rank())
    images = random.random((steps * BATCH, 28, 28), np.float32)
    return images, random.integers(0, 10, steps * BATCH)


def make_clock(steps):
    """Returns a callback that takes the seconds from the end of the warm steps to the last."""
    import keras

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch in (WARM_STEPS - 1, steps - 1):
                float(logs["loss"])  # JAX is ahead of its results
                now = time.perf_counter()
                if batch == WARM_STEPS - 1:
                    self.begin = now
                else:
                    self.seconds = now - self.begin

    return Clock()


def make_barrier():
    """Returns a callback that lets the ranks wait for each other after each step."""
    import keras

    import keras_dist

    class Barrier(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # JAX is ahead of its results
            keras_dist.barrier()  # MPI's own would wait without sleeping

    return Barrier()


def check_equal(models):
    """Ends the job unless a contender has left the same weights on every rank."""
    for name, model in models.items():
        sums = [float(np.sum(weight, dtype=np.float64)) for weight in model.get_weights()]
        if len({tuple(row) for row in everyones(sums)}) > 1:
            raise SystemExit(f"{name} has left different weights")
