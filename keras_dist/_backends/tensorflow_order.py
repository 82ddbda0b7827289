"""The order of host calls in TensorFlow graphs, also across loops, branches and functions."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# XLA shows the name in the error about a function that it cannot compile.
NAME = "keras_dist_calls_the_host.leave_out_jit_compile"


def in_order(
    place: Callable[..., Any],
    function: Callable[..., Any],
    tensors: Sequence[Any],
    dtypes: Sequence[Any],
) -> Any:
    """Adds a host call to a graph by `place`; it runs after those in front of it."""
    # TensorFlow runs the uses of a resource in program order, also those in loops, branches and
    # functions, each of which is one operation of the graph around it. Host calls alone have no
    # such order: the condition of a loop could run before a call that stands in front of the loop.
    return place(lambda *given: function(*given[:-1]), [*tensors, _order()], dtypes, name=NAME)


@functools.cache
def _order() -> Any:
    # No `tf.Variable`: a `tf.function` that makes one in its first call is traced twice.
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=(), shared_name=NAME)
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
        return handle
