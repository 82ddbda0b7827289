"""The TensorFlow backend: host functions in the graph, of views of TensorFlow's memory.

A graph runs the functions in program order, the same on every rank, see `tensorflow_order`. XLA
cannot compile them; `tensorflow_step` compiles the operations around them.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist._backends import HostFunction, OfTensor
from keras_dist._backends.tensorflow_host import (
    QueuedBuckets,
    as_array,
    differentiable,
    engine_arrays,
    on_host,
    to_tensor,
    uses_gpu,
)
from keras_dist._backends.tensorflow_step import Steps, refuse_strategy
from keras_dist._gpu import counts_host_memory

# Mean size of a tensor below which a copy takes less time than a tensor made of a leased result.
LENT_NBYTES = 128 * 1024


def _as_tensor(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    if tf.is_tensor(gradient.indices):
        return gradient
    values, indices = map(tf.convert_to_tensor, (gradient.values, gradient.indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _sum_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, segments = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, segments, tf.size(indices))
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _reduce_dense(fused: Any, gradients: Sequence[Any]) -> list[Any]:
    """Reduces gradients by bucket; TensorFlow keeps host functions for ever, so these are weak."""
    buckets = []
    for number, bucket in enumerate(fused.buckets):
        members = [slot.index for slot in bucket.slots]
        lend = fused.lends and bucket.nbytes >= LENT_NBYTES * len(members)
        inputs = [gradients[i] for i in members]
        buckets.append((number, members, _joined(bucket, inputs) if uses_gpu() else inputs, lend))
    # On a GPU, the host waits for the gradients of a bucket while the one before is reduced.
    pipelined = fused.overlaps or (uses_gpu() and len(fused.buckets) > 1)
    queued = QueuedBuckets(fused, uses_gpu()) if pipelined else None
    if queued is not None:
        for number, _, inputs, lend in buckets:
            queued.queue(number, inputs, lend)
    reduced: dict[int, Any] = {}
    for number, members, inputs, lend in buckets:
        slots = fused.buckets[number].slots
        wanted = [slot.shape for slot in slots]
        if uses_gpu():
            wanted = [(fused.buckets[number].count,)]
        buffers = [] if lend or uses_gpu() else [range(len(members))]
        if queued is not None:
            outputs = queued.results(number, inputs, wanted, buffers)
        else:
            reduce = functools.partial(_reduce_bucket, fused.weak(), number, lend)
            outputs = on_host(reduce, inputs, wanted, buffers=buffers, on_device=True)
        if uses_gpu():
            [flat] = outputs
            parts = [flat[slot.offset : slot.offset + slot.count] for slot in slots]
            pairs = zip(parts, slots, strict=True)
            outputs = [tf.reshape(part, slot.shape) for part, slot in pairs]
        reduced.update(zip(members, outputs, strict=True))
    return [reduced[i] for i in range(len(gradients))]


def _reduce_bucket(plan: Callable[[], Any], number: int, lend: bool, *arrays: Any) -> list[Any]:
    return plan().reduce_bucket(number, arrays, lend)


def _joined(bucket: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a bucket as one tensor, laid out as in the plan."""
    parts, end = [], 0
    for slot, gradient in zip(bucket.slots, gradients, strict=True):
        if slot.offset > end:
            parts.append(tf.zeros(slot.offset - end, gradient.dtype))
        parts.append(tf.reshape(gradient, (-1,)))
        end = slot.offset + slot.count
    return [tf.concat(parts, 0) if len(parts) > 1 else parts[0]]


def _reduce_rows(
    slices: tf.IndexedSlices, shape: tuple[int, ...], reduce_slices: Callable[..., Any]
) -> tf.IndexedSlices:
    shapes = [(None, *shape[1:]), (None,)]
    if uses_gpu():
        dtypes = [slices.values.dtype, slices.indices.dtype, tf.int64]
        given = [slices.values, slices.indices]
        values, indices, count = on_host(
            functools.partial(_rows_and_count, reduce_slices),
            given,
            [*shapes, ()],
            dtypes,
            on_device=True,
        )
        total = _sum_rows(tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape))
        if total.values.dtype.is_integer:  # averages of integers are not divided here
            return total
        average = total.values / tf.cast(count, total.values.dtype)
        return tf.IndexedSlices(average, total.indices, dense_shape=slices.dense_shape)
    values, indices = on_host(reduce_slices, [slices.values, slices.indices], shapes)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _rows_and_count(reduce_slices: Callable[..., Any], values: Any, indices: Any) -> list[Any]:
    """Returns the rows of all ranks and the number to divide by, wherever the arrays are."""
    rows, numbers, *count = reduce_slices(values, indices)
    return [rows, numbers, np.array(count[0] if count else 1, np.int64)]


class TensorFlow(Steps):
    """TensorFlow."""

    name = "tensorflow"
    engine_arrays = staticmethod(engine_arrays)

    def pin_device(self, local_rank: int, local_size: int) -> str | None:
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

    def gpu_number(self) -> int | None:
        if counts_host_memory():
            return 0
        visible = tf.config.get_visible_devices("GPU")
        return int(visible[0].name.rpartition(":")[2]) if visible else None

    def limit_threads(self, count: int, override: bool) -> None:
        threading = tf.config.threading
        chosen = (
            threading.get_intra_op_parallelism_threads() or "TF_NUM_INTRAOP_THREADS" in os.environ
        )
        if override or not chosen:
            # Once TensorFlow is running, the size of its pool is fixed.
            with contextlib.suppress(RuntimeError):
                threading.set_intra_op_parallelism_threads(count)

    def host_array(self, tensor: Any) -> np.ndarray:
        return as_array(tf.convert_to_tensor(tensor))

    def tensor_of(self, array: Any, like: Any) -> Any:
        return to_tensor(array)

    def reduce_gradients(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        variables: Sequence[Any],
        plan: Callable[..., Any],
        reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
        when: Any = None,
    ) -> list[Any]:
        """Reduces dense gradients by bucket, then rows; the last one, ready first, comes first."""
        refuse_strategy("gradients that keras_dist alone averages")
        reduced: dict[int, Any] = {}
        shapes = [tuple(variable.shape) for variable in variables]
        backwards = range(len(gradients) - 1, -1, -1)
        dense = [i for i in backwards if not isinstance(gradients[i], tf.IndexedSlices)]
        if dense:
            specs = [(shapes[i], np.dtype(gradients[i].dtype.as_numpy_dtype)) for i in dense]
            fused = plan(dense, specs, at_once=uses_gpu())
            results = _reduce_dense(fused, [gradients[i] for i in dense])
            reduced.update(zip(dense, results, strict=True))
        for i in backwards:
            if i not in reduced:
                reduced[i] = _reduce_rows(
                    gradients[i], shapes[i], functools.partial(reduce_slices, names[i])
                )
        return [reduced[i] for i in range(len(gradients))]

    def as_tensors(self, gradients: Sequence[Any]) -> list[Any]:
        return [gradient if gradient is None else _as_tensor(gradient) for gradient in gradients]

    def form_of(self, gradient: Any) -> tuple[str, str | None]:
        if isinstance(gradient, tf.IndexedSlices):
            return gradient.values.dtype.name, gradient.indices.dtype.name
        return tf.as_dtype(gradient.dtype).name, None

    def zeros(self, variable: Any, form: tuple[str, str | None]) -> Any:
        dtype, index_dtype = form
        if index_dtype is None:
            return tf.zeros(variable.shape, dtype)
        values = tf.zeros((0, *variable.shape[1:]), dtype)
        return tf.IndexedSlices(values, tf.zeros(0, index_dtype), tf.constant(list(variable.shape)))

    def is_traced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        return not tf.executing_eagerly()

    def differentiable(self, run: OfTensor, back: OfTensor, given: Any) -> Any:
        # A variable as argument would require a gradient of its own.
        tensors = [tf.convert_to_tensor(given)]
        return differentiable(lambda one: [run(one)], lambda _, one: [back(*one)], tensors)[0]

    def run_on_host(self, function: HostFunction, tensor: Any, on_device: bool) -> Any:
        return on_host(function, [tensor], [tensor.shape], on_device=on_device)[0]

    def call_uncompiled(self, function: Callable[[], Any]) -> Any:
        return tf.autograph.experimental.do_not_convert(function)()

    def eagerly(self) -> contextlib.AbstractContextManager[None]:
        return tf.init_scope()

    def call_host(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        tensors: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        return on_host(function, [tf.convert_to_tensor(tensor) for tensor in tensors], shapes)

    def when(self, condition: Any, work: Callable[[], None]) -> None:

        def taken() -> Any:
            work()
            return tf.constant(0)

        tf.cond(condition, taken, lambda: tf.constant(0))

    def after(self, earlier: Any, tensors: Sequence[Any]) -> list[Any]:
        with tf.control_dependencies([earlier]):
            return [tf.identity(tensor) for tensor in tensors]

    def coalesce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return [_sum_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]

    def as_dense(self, gradients: Sequence[Any]) -> list[Any]:
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    def multiply(self, gradients: Sequence[Any], factor: float) -> list[Any]:
        return [tf.math.scalar_mul(factor, gradient) for gradient in gradients]

    def end_update(
        self, gradients: Sequence[Any], variables: Sequence[Any], state: Sequence[Any]
    ) -> None:
        # Once rows of a variable have been updated, TensorFlow copies all of it for each read.
        # Without that mode it copies in the next update, if a read value is still in use.
        pairs = zip(gradients, variables, strict=True)
        tables = [
            variable for gradient, variable in pairs if isinstance(gradient, tf.IndexedSlices)
        ]
        if not tables:  # the usual case, in which an eager step saves the shapes of all states
            return
        shapes = {tuple(table.shape) for table in tables}
        for table in [*tables, *(each for each in state if tuple(each.shape) in shapes)]:
            tf.raw_ops.DisableCopyOnRead(resource=table.handle)


backend = TensorFlow()
