"""Differentiable reductions of tensors: `allreduce`, `reducescatter` and their grouped forms."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import _engine, errors, ops, runtime
from keras_dist._backends.tensorflow_host import as_array, differentiable
from keras_dist.ops.arguments import resolve_op
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.face import (
    Compressor,
    NoCompression,
    Reduction,
    compressed,
    decompressed,
    face,
    wire_of,
)
from keras_dist.ops.gradient_plans import bucket_nbytes
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.reduce_op import Compression as Wires
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.tensorflow.exchange_ops import grouped_allgather, rows_like
from keras_dist.tensorflow.host_callback import (
    as_eager,
    as_tensors,
    collective,
    is_eager,
    operation,
    raise_tensorflow_error,
)


class _TensorFlowCast(Compressor):
    """Casts floats, as Horovod does; keras_dist uses `wire` instead, and sums in full precision."""

    narrow: tf.DType

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        given = tensor if tf.is_tensor(tensor) else tf.convert_to_tensor(tensor)
        return (tf.cast(given, cls.narrow) if given.dtype.is_floating else given), given.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx)


class Compression:
    """The available compressions; those with errors are of `keras_dist.Compression`."""

    none = NoCompression
    powersgd = staticmethod(Wires.powersgd)
    topk = staticmethod(Wires.topk)
    int8, int4 = Wires.int8, Wires.int4

    class fp16(_TensorFlowCast):
        """Floats of 16 bits between nodes."""

        wire, narrow = Wires.fp16, tf.float16

    class bf16(_TensorFlowCast):
        """bfloat16 between nodes."""

        wire, narrow = Wires.bf16, tf.bfloat16


@described_by(ops.allreduce)
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The gradient of `Average` and `Sum` is the same reduction of gradients; other ops have none.

    `IndexedSlices` have no gradient.

    Args:
        tensor: a tensor, a variable or a value that TensorFlow converts to a tensor, of any numeric
            dtype, bfloat16 included. `IndexedSlices` are reduced as by
            `keras_dist.sparse_allreduce`.
        compression: a member of `Compression`, or a `Compressor` subclass, whose methods work on
            tensors; a value that `keras_dist.allreduce` takes works as well. Has no effect on
            `IndexedSlices`. Defaults to `KERAS_DIST_COMPRESSION`.

    Returns:
        Tensor of the shape and dtype of `tensor`, or `IndexedSlices`.

    Raises:
        NotImplementedError: `IndexedSlices` with an op other than `Average` and `Sum`, or with a
            factor.

    Example:
    ```python
    import keras_dist.tensorflow as hvd

    loss = hvd.allreduce(loss, op=hvd.Average)
    ```
    """
    if average is None and compression is None and is_eager(tensor):
        try:
            array = ops.allreduce(
                as_array(tensor), op, name, prescale_factor, postscale_factor, process_set
            )
        except errors.KerasDistError as error:
            raise_tensorflow_error(error)
        return as_eager(array)
    factors = prescale_factor, postscale_factor
    options = "", "", compression, op, *factors, process_set, ignore_name_scope, name
    return grouped_allreduce([tensor], average, *options)[0]


@operation
@face(ops.grouped_allreduce)
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """The gradient is that of `allreduce`.

    Args:
        tensors: list of tensors; dtypes may differ, and `IndexedSlices` may be among them.

    Raises:
        NotImplementedError: as in `allreduce`.
    """
    wire = wire_of(compression)
    op = resolve_op(op, average)
    reduction = Reduction(op, name, prescale_factor, postscale_factor, process_set, wire)
    # The first check is fast, the second is slow.
    sparse = [
        index
        for index, value in enumerate(tensors)
        if not isinstance(value, tf.Tensor) and isinstance(value, tf.IndexedSlices)
    ]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    if sparse:
        _check_reduces_slices(reduction)
    result: dict[int, Any] = {}
    if dense or not sparse:
        inputs, contexts = compressed(compression, as_tensors([tensors[i] for i in dense]))
        reduced = decompressed(compression, _reduce(inputs, reduction), contexts)
        result.update(zip(dense, reduced, strict=True))
    for i in sparse:
        result[i] = _reduce_slices(tensors[i], reduction)
    return [result[i] for i in range(len(tensors))]


@described_by(ops.reducescatter)
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = None,
    op: ReduceOp | str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """The gradient is an allgather; for `Sum` times the number of ranks, as in Horovod."""
    options = op, process_set, prescale_factor, postscale_factor, name
    return grouped_reducescatter([tensor], "", compression, *options)[0]


@operation
@face(ops.grouped_reducescatter)
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = None,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """The gradient is that of `reducescatter`."""
    reduction = Reduction(op, name, prescale_factor, postscale_factor, process_set)

    def reduce(*arrays: Any) -> Any:
        return reduction.reducescatter(arrays)

    def forward(*given: Any) -> list[Any]:
        return collective(reduce, given, [rows_like(tensor) for tensor in given])

    def backward(_: Any, upstream: list[Any]) -> list[Any]:
        factor = reduction.scatter_gradient_factor
        scaled = [tf.cast(factor, gradient.dtype) * gradient for gradient in upstream]
        return grouped_allgather(scaled, _gradient_name(name), process_set=process_set)

    return differentiable(forward, backward, as_tensors(tensors))


def _reduce(tensors: Sequence[Any], reduction: Reduction) -> list[Any]:
    def reduce(*arrays: Any) -> Any:
        return reduction.allreduce(arrays)

    def forward(*given: Any) -> list[Any]:
        buffers = () if tf.executing_eagerly() else _buffers(given, reduction.process_set)
        return collective(reduce, given, [tensor.shape for tensor in given], buffers=buffers)

    def backward(_: Any, upstream: list[Any]) -> list[Any]:
        reduction.check_differentiable()
        return _reduce(
            upstream, dataclasses.replace(reduction, name=_gradient_name(reduction.name))
        )

    return differentiable(forward, backward, tensors)


def _buffers(tensors: Sequence[Any], process_set: ProcessSet) -> list[list[int]]:
    """Returns the indices of the results in each buffer of a reduction, in order."""
    known = all(tensor.shape.is_fully_defined() for tensor in tensors)
    if not known or not runtime.includes_me(process_set):  # in a branch for other ranks
        return []
    specs = [(tuple(tensor.shape), np.dtype(tensor.dtype.as_numpy_dtype)) for tensor in tensors]
    buckets = _engine.plan_buckets(specs, bucket_nbytes())
    return [[slot.index for slot in bucket.slots] for bucket in buckets]


def _reduce_slices(slices: tf.IndexedSlices, reduction: Reduction) -> tf.IndexedSlices:
    def reduce(values: Any, indices: Any) -> Any:
        rows, row_indices = ops.sparse_allreduce(
            values, indices, reduction.op, reduction.name, reduction.process_set
        )
        return rows, row_indices.astype(indices.dtype)

    shapes = [rows_like(slices.values), (None,)]
    values, indices = collective(reduce, [slices.values, slices.indices], shapes)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _gradient_name(name: str | None) -> str | None:
    return None if name is None else f"the gradient of {name}"


def _check_reduces_slices(reduction: Reduction) -> None:
    factors = (reduction.prescale_factor, reduction.postscale_factor)
    if reduction.is_differentiable and factors == (1.0, 1.0):
        return
    text = errors.explain(
        runtime.where(),
        "op to be Average or Sum, and no factors, for IndexedSlices",
        f"op={reduction.op} and factors {factors}",
        "Convert the IndexedSlices by tf.convert_to_tensor, or pass sparse_as_dense=True.",
    )
    raise NotImplementedError(text)
