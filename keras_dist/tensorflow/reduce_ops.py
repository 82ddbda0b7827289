"""Reductions of tensors, with gradients: `allreduce`, `reducescatter` and their grouped forms."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import _engine, errors, ops, runtime
from keras_dist.ops.arguments import chosen_op
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.ops.reduce_op import Average, ReduceOp, Sum
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.ops.tensor_compression import compressed, decompressed, wire_of
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.tensorflow.exchange_ops import grouped_allgather
from keras_dist.tensorflow.host_callback import collective, differentiable, operation
from keras_dist.tensorflow.tensors import as_tensors

__all__ = ["allreduce", "grouped_allreduce", "grouped_reducescatter", "reducescatter"]


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
    """Combines the tensors of all ranks into one, with the same bits on each.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    The gradient of a sum or an average is that of the ranks' losses together: the same reduction
    of their gradients. Other ops have none, nor have `IndexedSlices`.

    Args:
        tensor: a tensor, a variable or what a tensor can be made from, of any numeric dtype,
            bfloat16 included. `IndexedSlices` are reduced as rows: those of equal index are
            added up, within a rank and over ranks.
        average: deprecated: `True` is `op=Average`, `False` is `op=Sum`.
        device_dense: accepted; has no effect, tensors travel through the host.
        device_sparse: as `device_dense`.
        compression: of `Compression`, or a class with its methods, which work on tensors; has no
            effect on `IndexedSlices`. What `keras_dist.allreduce` takes works as well. Defaults to
            `KERAS_DIST_COMPRESSION`.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`, or its name. Defaults to
            `Average`.
        prescale_factor: every rank's tensor is multiplied by it first. Defaults to 1.0.
        postscale_factor: the result is multiplied by it. Defaults to 1.0.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part. Defaults to all.
        ignore_name_scope: accepted; has no effect, scopes are no part of names here.

    Returns:
        Tensor of the shape and dtype of `tensor`, or `IndexedSlices`.

    Raises:
        FailedPreconditionError: the ranks differ; raised on every rank. It is a `MismatchError`.
        InvalidArgumentError: an argument cannot be used. It is an `ArgumentError`, or an
            `ArgumentTypeError`.
        NotImplementedError: `IndexedSlices` with an op other than sum and average, or a factor.

    Example:
    ```python
    import keras_dist.tensorflow as hvd

    loss = hvd.allreduce(loss, op=hvd.Average)
    ```
    """
    how = (compression, op, prescale_factor, postscale_factor, process_set)
    return grouped_allreduce([tensor], average, "", "", *how, name=name)[0]


@operation
@raises_on_all
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
    """Does `allreduce` for a list of tensors at once: small ones travel together.

    Collective: as `allreduce`.

    Args:
        tensors: list of tensors; dtypes may differ, and `IndexedSlices` may be among them.
        average: as for `allreduce`.
        device_dense: as for `allreduce`.
        device_sparse: as for `allreduce`.
        compression: as for `allreduce`.
        op: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`.
        ignore_name_scope: as for `allreduce`.
        name: as for `allreduce`.

    Returns:
        List of tensors.

    Raises:
        FailedPreconditionError: as `allreduce`.
        InvalidArgumentError: as `allreduce`.
        NotImplementedError: as `allreduce`.
    """
    chosen = chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    rows = [i for i, one in enumerate(tensors) if _is_rows(one)]
    dense = [i for i in range(len(tensors)) if i not in rows]
    if rows:
        _check_rows(chosen, factors)
    result: dict[int, Any] = {}
    if dense or not rows:
        small, contexts = compressed(compression, as_tensors([tensors[i] for i in dense]))
        how = (factors, process_set, wire_of(compression))
        reduced = decompressed(compression, _reduced(small, chosen, name, *how), contexts)
        result.update(zip(dense, reduced, strict=True))
    for i in rows:
        result[i] = _reduced_rows(tensors[i], chosen, name, process_set)
    return [result[i] for i in range(len(tensors))]


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
    """Combines the tensors of all ranks and gives each rank its part of the rows.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    Rows are shared out in rank order; where they do not divide, the first ranks get one more. The
    gradient is an allgather of the ranks' gradients, as in Horovod times the number of ranks where
    `op` is `Sum`.

    Args:
        tensor: a tensor with at least one dimension.
        device_dense: accepted; has no effect.
        compression: accepted; has no effect.
        op: `Average` or `Sum`, or its name. Defaults to `Average`.
        name: as for `allreduce`.
        process_set: as for `allreduce`.
        ignore_name_scope: accepted; has no effect.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        Tensor: this rank's rows.

    Raises:
        FailedPreconditionError: the ranks differ; raised on every rank.
        InvalidArgumentError: `tensor` is a scalar, or `op` another one.
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], "", None, op, process_set, *factors, name=name)[0]


@operation
@raises_on_all
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
    """Does `reducescatter` for a list of tensors at once: they travel together.

    Collective: as `reducescatter`.

    Args:
        tensors: list of tensors with at least one dimension.
        device_dense: accepted; has no effect.
        compression: accepted; has no effect.
        op: as for `reducescatter`.
        process_set: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        name: as for `allreduce`.

    Returns:
        List of tensors: this rank's rows of each.

    Raises:
        FailedPreconditionError: as `reducescatter`.
        InvalidArgumentError: as `reducescatter`.
    """
    factors = (prescale_factor, postscale_factor)

    def reduce(*arrays: Any) -> Any:
        return ops.grouped_reducescatter(arrays, op, name, *factors, process_set)

    def forward(*given: Any) -> list[Any]:
        return collective(reduce, given, [(None, *one.shape[1:]) for one in given])

    def backward(_: Any, upstream: list[Any]) -> list[Any]:
        sums = _engine.parse_op(op, runtime.where()) is Sum
        factor = prescale_factor * postscale_factor
        factor *= runtime.communicator(process_set).size if sums else 1
        scaled = [tf.math.scalar_mul(factor, gradient) for gradient in upstream]
        return grouped_allgather(scaled, _of_gradient(name), process_set=process_set)

    return differentiable(forward, backward, as_tensors(tensors))


def _reduced(
    tensors: Sequence[Any],
    op: Any,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    compression: Any,
) -> list[Any]:
    def reduce(*arrays: Any) -> Any:
        how = (op, name, *factors, process_set, compression)
        return ops.grouped_allreduce(arrays, *how)

    def forward(*given: Any) -> list[Any]:
        buffers = () if tf.executing_eagerly() else _buffers(given, process_set)
        return collective(reduce, given, [one.shape for one in given], buffers=buffers)

    def backward(_: Any, upstream: list[Any]) -> list[Any]:
        _check_has_gradient(op)
        how = (factors, process_set, compression)
        return _reduced(upstream, op, _of_gradient(name), *how)

    return differentiable(forward, backward, tensors)


def _is_rows(one: Any) -> bool:
    # TensorFlow tells sooner that a tensor is one than that it is nothing else.
    return not isinstance(one, tf.Tensor) and isinstance(one, tf.IndexedSlices)


def _buffers(tensors: Sequence[Any], process_set: ProcessSet) -> list[list[int]]:
    """Returns which results of a reduction lie in one buffer: their places, in their order."""
    known = all(one.shape.is_fully_defined() for one in tensors)
    if not known or not runtime.includes_me(process_set):  # a branch that others take
        return []
    specs = [(tuple(one.shape), np.dtype(one.dtype.as_numpy_dtype)) for one in tensors]
    buckets = _engine.plan_buckets(specs, bucket_nbytes(runtime.communicator(process_set)))
    return [[slot.index for slot in bucket.slots] for bucket in buckets]


def _reduced_rows(
    slices: tf.IndexedSlices, op: Any, name: str | None, process_set: ProcessSet
) -> tf.IndexedSlices:
    def reduce(values: Any, indices: Any) -> Any:
        rows, places = ops.sparse_allreduce(values, indices, op, name, process_set)
        return rows, places.astype(indices.dtype)

    given = [slices.values, slices.indices]
    values, indices = collective(reduce, given, [(None, *slices.values.shape[1:]), (None,)])
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"the gradient of {name}"


def _check_rows(op: Any, factors: tuple[float, float]) -> None:
    if _engine.parse_op(op, runtime.where()) in (Average, Sum) and factors == (1.0, 1.0):
        return
    raise NotImplementedError(
        errors.explain(
            runtime.where(),
            "op to be Average or Sum, and no factors, for IndexedSlices",
            f"op={op} and factors {factors}",
            "Make them dense first, by tf.convert_to_tensor, or pass sparse_as_dense=True.",
        )
    )


def _check_has_gradient(op: Any) -> None:
    if _engine.parse_op(op, runtime.where()) in (Average, Sum):
        return
    raise errors.ArgumentError(
        errors.explain(
            runtime.where(),
            "op to be Average or Sum in an allreduce that is differentiated",
            str(op),
            "Put tf.stop_gradient around it where no gradient is wanted.",
        )
    )
