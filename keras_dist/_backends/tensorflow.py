"""TensorFlow: host functions inside the graph (`tensorflow_host`).

Inputs of a host function are views of TensorFlow's own memory and cost nothing. The
functions are stateful operations, so a graph runs them in the order of its program, the
same on every rank; XLA cannot compile them, so it compiles what is around them
(`tensorflow_step`).
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import errors
from keras_dist._backends.tensorflow_host import on_host
from keras_dist._backends.tensorflow_step import train_step_for_host

# Of a tensor, on average: below, it takes longer to make a tensor of what is lent than to copy it.
LENT_NBYTES = 128 * 1024

OnHost = Callable[[np.ndarray], np.ndarray]

__all__ = [
    "add_up_rows",
    "after",
    "as_dense",
    "build_from",
    "check_model",
    "finish_calls",
    "first_batch",
    "limit_threads",
    "multiply",
    "on_host",
    "pass_over",
    "pin_device",
    "pull_back",
    "reduce_gradients",
    "through_host",
    "train_step_for_host",
]


def pin_device(local_rank: int, local_size: int) -> str | None:
    """Makes this process use the GPU of its local rank, growing memory as needed.

    See `Backend.pin_device`.
    """
    gpus = tf.config.list_physical_devices("GPU")
    visible = tf.config.get_visible_devices("GPU")
    if not gpus or (len(visible) < len(gpus)):
        return None
    gpu = gpus[local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    except (RuntimeError, ValueError) as error:
        if len(gpus) == 1 or local_size == 1:
            return None
        return (
            f"GPU {local_rank % len(gpus)} could not be pinned ({error}), so ranks of this "
            f"node share GPUs. Call keras_dist.init() before anything else uses TensorFlow."
        )
    if 1 < len(gpus) < local_size:
        return f"shares its GPU: {local_size} ranks on this node, {len(gpus)} GPUs."
    return None


def limit_threads(count: int, override: bool) -> None:
    """Sizes the pool that computes inside an operation. See `Backend.limit_threads`."""
    threading = tf.config.threading
    chosen = threading.get_intra_op_parallelism_threads() or "TF_NUM_INTRAOP_THREADS" in os.environ
    if override or not chosen:
        # Where TensorFlow is already running, its pool stays as it is.
        with contextlib.suppress(RuntimeError):
            threading.set_intra_op_parallelism_threads(count)


def finish_calls() -> None:
    """Does nothing: a program returns when it has called. See `Backend.finish_calls`."""


def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    variables: Sequence[Any],
    plan: Callable[[Sequence[int], Sequence[tuple[tuple[int, ...], np.dtype]]], Any],
    reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
    when: Any = None,
) -> list[Any]:
    """Reduces dense gradients by bucket and `IndexedSlices` by rows.

    See `Backend.reduce_gradients`. The last gradient comes first: backpropagation has it
    ready first, so its bucket need not wait for the others.
    """
    reduced: dict[int, Any] = {}
    shapes = [tuple(variable.shape) for variable in variables]
    backwards = range(len(gradients) - 1, -1, -1)
    dense = [i for i in backwards if not isinstance(gradients[i], tf.IndexedSlices)]
    if dense:
        specs = [(shapes[i], np.dtype(gradients[i].dtype.as_numpy_dtype)) for i in dense]
        fused = plan(dense, specs)
        for number, bucket in enumerate(fused.buckets):
            members = [dense[slot.index] for slot in bucket.slots]
            inputs = [gradients[i] for i in members]
            wanted = [shapes[i] for i in members]
            lend = fused.lends and bucket.nbytes >= LENT_NBYTES * len(members)
            buffers = [] if lend else [range(len(members))]
            outputs = on_host(fused.bound_to(number, lend), inputs, wanted, buffers=buffers)
            reduced.update(zip(members, outputs, strict=True))
    for i in backwards:
        if i not in reduced:
            reduced[i] = _reduce_rows(
                gradients[i], shapes[i], functools.partial(reduce_slices, names[i])
            )
    return [reduced[i] for i in range(len(gradients))]


def through_host(tensor: Any, forward: OnHost, backward: OnHost) -> Any:
    """Calls the host, for the gradient too. See `Backend.through_host`."""

    def call(function: OnHost, local: Any) -> Any:
        return on_host(function, [local], [local.shape])[0]

    @tf.custom_gradient
    def through(local: Any) -> tuple[Any, Callable[[Any], Any]]:
        return call(forward, local), lambda gradient: call(backward, gradient)

    return through(tf.convert_to_tensor(tensor))  # variables would want gradients of their own


def after(earlier: Any, tensors: Sequence[Any]) -> list[Any]:
    """Orders a graph, in which a branch does not wait for the host. See `Backend.after`."""
    with tf.control_dependencies([earlier]):
        return [tf.identity(tensor) for tensor in tensors]


def pull_back(
    model: Any, inputs: np.ndarray, loss: Callable[[Any], Any] | None, through: bool
) -> tuple[np.ndarray, Callable[[np.ndarray, float], tuple[list[Any], np.ndarray | None]]]:
    """Keeps a tape. See `Backend.pull_back`."""
    given, weights = tf.convert_to_tensor(inputs), [v.value for v in model.trainable_variables]
    sources = [*weights, *([given] if through else [])]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        outputs = model(given, training=True)
        result, penalties = outputs if loss is None else loss(outputs), model.losses

    def back(gradient: np.ndarray, factor: float) -> tuple[list[Any], np.ndarray | None]:
        factors = [tf.constant(factor, penalty.dtype) for penalty in penalties]
        found = tape.gradient(
            [result, *penalties],
            sources,
            output_gradients=[tf.convert_to_tensor(gradient), *factors],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        dense = as_dense(found)
        return dense[: len(weights)], dense[-1].numpy() if through else None

    return result.numpy(), back


def add_up_rows(gradients: Sequence[Any]) -> list[Any]:
    """Adds up the rows of `IndexedSlices` that have the same index. See `Backend.add_up_rows`."""
    return [_add_up(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def as_dense(gradients: Sequence[Any]) -> list[Any]:
    """Makes `IndexedSlices` dense. See `Backend.as_dense`."""
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def multiply(gradients: Sequence[Any], factor: float) -> list[Any]:
    """Multiplies gradients, `IndexedSlices` too, by a number. See `Backend.multiply`."""
    return [tf.math.scalar_mul(factor, gradient) for gradient in gradients]


def pass_over(count: int, logs: dict[str, Any], iterator: Any) -> dict[str, Any]:
    """Takes batches from the iterator. See `Backend.pass_over`."""
    next(iterator)  # no more data is the end of an epoch, unless it ends within an execution
    for _ in itertools.islice(iterator, count - 1):
        pass
    return logs


def first_batch(count: int, iterator: Any) -> tuple[Any, tuple[Any, ...]]:
    """Takes batches from the iterator; gives one of these. See `Backend.first_batch`.

    It has the same type as the other, so nothing is traced anew; which needs dense tensors.
    """
    specs = tf.nest.flatten(getattr(iterator, "element_spec", None))
    if not isinstance(iterator, tf.data.Iterator) or not all(
        isinstance(spec, tf.TensorSpec) for spec in specs
    ):
        return None, (iterator,)
    taken = [one.get_value() for one in _taken(iterator, count)]
    if not taken:
        return None, (iterator,)

    def as_told(*batch: Any) -> Any:
        tensors = [
            tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=spec.shape)
            for tensor, spec in zip(tf.nest.flatten(batch), specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(iterator.element_spec, tensors)

    each = [tf.data.Dataset.from_tensors(batch).map(as_told) for batch in taken]
    again = functools.reduce(lambda one, other: one.concatenate(other), each)
    return taken[0], (iter(again),)


def _taken(iterator: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        one = iterator.get_next_as_optional()
        if not one.has_value():
            return
        yield one


def build_from(model: Any, batches: Any) -> None:
    """Traces a train step, which creates the variables, without running it.

    See `Backend.build_from`.
    """
    try:
        tf.function(model.train_step).get_concrete_function(batches.element_spec)
    except Exception as error:
        raise errors.ArgumentError(
            errors.explain(
                "[keras_dist]",
                f"to build model {model.name!r} from the shapes of its data",
                f"{type(error).__name__}: {error}",
                "Build it before fit: model.build(input_shape), or call it on one batch.",
            )
        ) from error


def check_model(model: Any) -> None:
    """Does nothing yet: strategies of TensorFlow do not train over processes in Keras 3."""


def _add_up(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _reduce_rows(
    slices: tf.IndexedSlices, shape: tuple[int, ...], reduce_slices: Callable[..., Any]
) -> tf.IndexedSlices:
    given = [slices.values, slices.indices]
    values, indices = on_host(reduce_slices, given, [(None, *shape[1:]), (None,)])
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)
