"""Each rank in turn passes invalid arguments to the functions for a framework; all raise."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from faults import fault

import keras_dist

FACE = os.environ["KERAS_BACKEND"]
hvd = importlib.import_module(f"keras_dist.{FACE}")
hvd.init()
wrong: str | None = None


def valid() -> Any:
    from keras import ops

    return ops.convert_to_tensor(np.ones(3, "float32"))


def given() -> Any:
    return object() if wrong == "value" else valid()


def reduce() -> Any:
    return hvd.allreduce(given(), op="median" if wrong == "kind" else "sum")


def reduce_compiled() -> Any:
    """A queued or compiled reduction."""
    if FACE == "tensorflow":
        import tensorflow as tf

        return tf.function(reduce)()
    if FACE == "jax":
        import jax

        return jax.jit(reduce)().block_until_ready()
    return hvd.synchronize(hvd.allreduce_async(given(), name="a"))


calls: list[Callable[[], Any]] = [
    reduce,
    lambda: hvd.allgather(given()),
    lambda: hvd.broadcast(given(), 0),
    lambda: hvd.grouped_allreduce(3 if wrong else [given()]),
    lambda: keras_dist.allreduce(1.0, name=[] if wrong else None),  # type: ignore[arg-type]
    reduce_compiled,
]
fault()
for rank in range(2):
    for number, call in enumerate(calls):
        for kind in ("value", "kind"):
            wrong = kind if hvd.rank() == rank else None
            failed = False
            try:
                call()
            except Exception:
                failed = True
            place = number, kind, failed
            assert keras_dist.allgather_object(place) == [place] * 2
wrong = None
print("in step", hvd.allreduce(valid(), op=hvd.Sum), flush=True)
