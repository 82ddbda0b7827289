"""Who trains in the benchmark of fit, on every rank: contenders, their models, their data."""

import contextlib
import time
from unittest import mock

import numpy as np
from models import MODELS
from ranks import barrier, everyones, total
from turns import in_turn

WARM_STEPS = 3
DIFFER = ("none", "together", "loop", "post_local")  # weights of the ranks, after a fit
RATE = 0.01
LOCAL_STEPS = 64  # between two exchanges of the contenders that do not talk every step
FRAGMENTS = {"fragments": 2, "delay": 8}
# By contender with local steps: how the averages travel, and their compression.
LOCAL = {
    "local": ({}, "none"),
    "streaming": (FRAGMENTS, "none"),
    "streaming_int8": (FRAGMENTS, "int8"),
}


def time_fits(task):
    """Returns samples/s of all ranks together, for each contender and round.

    Args:
        task: the model as "task", its "contenders", the number of "rounds" and of measured "steps",
            also by contender.
    """
    from keras_dist import runtime

    model, given = MODELS[task["task"]], task["steps"]
    steps = given if isinstance(given, dict) else dict.fromkeys(task["contenders"], given)
    fits = {name: make_fit(name, model, WARM_STEPS + count) for name, count in steps.items()}

    def rate(name):
        barrier()
        clock = make_clock(WARM_STEPS + steps[name])
        fits[name](clock)
        return total(steps[name] * model.batch_size / clock.seconds)

    for name in fits:
        rate(name)
    found = in_turn(fits, task["rounds"], rate)
    if runtime.size() > 1:
        check_equal({name: fit.model for name, fit in fits.items() if name not in DIFFER})
    return found


class Fit:
    """Trains a model with Keras' fit on a rank's share of the data.

    Args:
        model: a compiled Keras model.
        data: as `fit` takes it.
        callbacks: those of the contender.
        scope: returns the context in which it trains.
    """

    def __init__(self, model, data, callbacks=list, scope=contextlib.nullcontext, **options):
        self.model = model
        self._data, self._callbacks, self._scope = data, callbacks, scope
        self._options = {"epochs": 1, "verbose": 0, **options}

    def __call__(self, clock):
        with self._scope():
            callbacks = [*self._callbacks(), clock]
            self.model.fit(*self._data, callbacks=callbacks, **self._options)


def make_fit(name, model, steps):
    """Returns a function of a clock that trains as a contender does."""
    import keras

    import keras_dist

    count = steps * model.batch_size
    if name in ("loop", "ddp", "ddp_apart", "post_local"):
        from torch_loop import Loop

        module = model.compiled(keras.optimizers.SGD(RATE))
        period = LOCAL_STEPS if name == "post_local" else 0
        averages = name in ("ddp", "ddp_apart")
        loop = Loop(module, averages, RATE, overlaps=name == "ddp", period=period)
        data = model.data(count, keras_dist.rank())
        return loop.bound_to(*data, model.batch_size)
    if name == "parallel":
        from data_parallel import data_parallel

        make, scope = data_parallel(lambda: model.compiled(keras.optimizers.SGD(RATE)))
        inputs, labels = model.data(count, keras_dist.rank())
        given = list(inputs) if isinstance(inputs, tuple) else inputs
        return Fit(make(), (given, labels), scope=scope, batch_size=model.batch_size)
    optimizer = naive_sgd(RATE) if name == "naive" else keras.optimizers.SGD(RATE)
    if name in ("ours", "apart", *LOCAL):
        options = {}
        if name in LOCAL:
            streaming, compression = LOCAL[name]
            options["local_steps"] = keras_dist.LocalSteps(LOCAL_STEPS, **streaming)
            options["compression"] = compression
        optimizer = keras_dist.DistributedOptimizer(optimizer, **options)
    whole = model.data(count * keras_dist.size(), 0)
    data = keras_dist.data.shard(whole, batch_size=model.batch_size)
    callbacks = {"together": lambda: [make_barrier()]}
    callbacks |= dict.fromkeys(("ours", "apart", *LOCAL), keras_dist.callbacks)
    scope = without_overlap if name == "apart" else contextlib.nullcontext
    return Fit(model.compiled(optimizer), (data,), callbacks.get(name, list), scope)


def without_overlap():
    """Returns a context in which plans of gradients do not overlap."""
    from keras_dist.ops import gradient_plans

    return mock.patch.object(gradient_plans, "overlaps", lambda comm: False)


def naive_sgd(rate):
    """Returns an SGD that averages its gradients one by one, as a first attempt would."""
    import keras
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def average(gradient):
        out = np.empty_like(gradient)
        world.Allreduce(gradient, out)
        return out / np.float32(world.size)

    on_host = HOST_CALLS[keras.backend.backend()]

    class NaiveSGD(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            return super()._clip_gradients(on_host(average, grads))

    return NaiveSGD(rate)


def tensorflow_calls(function, gradients):
    import tensorflow as tf

    results = []
    for gradient in gradients:
        dense = tf.convert_to_tensor(gradient)
        result = tf.numpy_function(function, [dense], dense.dtype)
        result.set_shape(dense.shape)
        results.append(result)
    return results


def jax_calls(function, gradients):
    """Calls a function of the host with each gradient in turn.

    Each call takes what the call before returned, so all ranks have one order. An `io_callback`
    gives the host an array that is copied by a thread of the pool in which the program runs: on one
    core it may wait forever.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.buffer_callback import buffer_callback

    def call(context, results, gradient, _):
        np.asarray(results[0])[...] = function(np.asarray(gradient))
        np.asarray(results[1])[...] = 0

    results, turn = [], jnp.zeros(())
    for gradient in gradients:
        specs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (gradient, turn)]
        result, turn = buffer_callback(call, specs, has_side_effect=True)(gradient, turn)
        results.append(result)
    return results


def torch_calls(function, gradients):
    import torch

    return [torch.from_numpy(function(gradient.numpy())) for gradient in gradients]


HOST_CALLS = {"tensorflow": tensorflow_calls, "jax": jax_calls, "torch": torch_calls}


def make_clock(steps):
    """Returns a callback that takes the seconds from the end of the warm steps to the last.

    It has no batch hook: keras_dist would agree after every batch on whether it stops training.
    """
    import keras

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.step, self.batches = self.model.train_function, 0

            def timed(*arguments):
                result = self.step(*arguments)
                # JAX returns its state as well.
                self.count(result[0] if isinstance(result, tuple) else result)
                return result

            self.model.train_function = timed

        def on_train_end(self, logs=None):
            self.model.train_function = self.step

        def count(self, logs):
            self.batches += 1
            if self.batches in (WARM_STEPS, steps):
                float(logs["loss"])  # JAX is ahead of its results
                now = time.perf_counter()
                if self.batches == WARM_STEPS:
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
    import keras

    for name, model in models.items():
        weights = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_variables]
        sums = [float(np.sum(weight, dtype=np.float64)) for weight in weights]
        if len({tuple(row) for row in everyones(sums)}) > 1:
            raise SystemExit(f"{name} has left different weights")
