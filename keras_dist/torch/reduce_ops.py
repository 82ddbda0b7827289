"""Reductions of tensors: `allreduce`, its grouped form, those in place, and of sparse tensors."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from keras_dist import ops
from keras_dist._backends.torch_tensors import (
    differentiable,
    is_on_device,
    rows_of,
    sparse_of,
    to_array,
    to_numpy,
    to_tensors,
    to_torch,
    write_all,
    write_into,
)
from keras_dist.ops.arguments import resolve_op
from keras_dist.ops.face import (
    Compressor,
    NoCompression,
    Reduction,
    compressed,
    decompressed,
    wire_of,
)
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.reduce_op import Compression as Wires
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch.compilation import untraced_face


class _TorchCast(Compressor):
    """Casts floats, as Horovod does; keras_dist uses `wire` instead, and sums in full precision."""

    narrow: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.narrow) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The available compressions; those with errors are of `keras_dist.Compression`."""

    none = NoCompression
    powersgd = staticmethod(Wires.powersgd)
    topk = staticmethod(Wires.topk)
    int8, int4 = Wires.int8, Wires.int4

    class fp16(_TorchCast):
        """Floats of 16 bits between nodes."""

        wire, narrow = Wires.fp16, torch.float16

    class bf16(_TorchCast):
        """bfloat16 between nodes."""

        wire, narrow = Wires.bf16, torch.bfloat16


@untraced_face(ops.allreduce)
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The gradient of `Average` and `Sum` is the same reduction of gradients; other ops have none.

    Args:
        compression: a member of `Compression`, or a `Compressor` subclass, whose methods work on
            tensors. Defaults to `Compression.none`.

    Returns:
        New tensor of the shape, dtype and device of `tensor`.
    """
    chosen = resolve_op(op, average)
    is_plain = compression is None or compression is Compression.none
    if is_plain and not (torch.is_grad_enabled() and tensor.requires_grad):
        wire = None if compression is None else Wires.none
        factors = prescale_factor, postscale_factor
        return reduce_tensor(tensor, chosen, name, *factors, process_set, wire)
    options = chosen, prescale_factor, postscale_factor, process_set
    return grouped_allreduce([tensor], None, name, compression, *options)[0]


@untraced_face(ops.allreduce)
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The result is written into the tensor, in place.

    Returns:
        `tensor`.
    """
    chosen = resolve_op(op, average)
    options = chosen, name, prescale_factor, postscale_factor, process_set
    if is_on_device(tensor):
        return write_into(tensor, reduce_tensor(tensor, *options))
    array = to_numpy(tensor)
    return write_back(ops.allreduce(array, *options, out=array), tensor)


@untraced_face(ops.grouped_allreduce)
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """The gradient is that of `allreduce`."""
    inputs, contexts = compressed(compression, tensors)
    op, wire = resolve_op(op, average), wire_of(compression)
    reduction = Reduction(op, name, prescale_factor, postscale_factor, process_set, wire)
    return decompressed(compression, reduce_with_gradient(reduction, *inputs), contexts)


@untraced_face(ops.grouped_allreduce)
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """The results are written into the tensors, in place.

    Returns:
        `tensors`, as a list.
    """
    chosen = resolve_op(op, average)
    reduction = Reduction(chosen, name, prescale_factor, postscale_factor, process_set)
    arrays = reduction.allreduce([to_array(tensor) for tensor in tensors])
    write_all(tensors, to_tensors(arrays, tensors))
    return list(tensors)


@untraced_face(ops.sparse_allreduce)
def sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The values and indices are those of one sparse tensor.

    Args:
        tensor: a sparse COO tensor.

    Returns:
        Sparse COO tensor of the same shape.
    """
    tensor = tensor.coalesce()
    return sparse_of(*ops.sparse_allreduce(*rows_of(tensor), op, name, process_set), tensor)


def reduce_tensors(reduction: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reduces tensors. Collective: see `keras_dist.grouped_allreduce`."""
    arrays = reduction.allreduce([to_array(tensor) for tensor in tensors])
    found = tuple(to_tensors(arrays, tensors))
    if len(found) < 2 or not is_on_device(found[0]):
        return found
    own = tuple(map(torch.empty_like, found))  # those found are views of one tensor
    write_all(own, found)
    return own


def reduce_with_gradient(reduction: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reduces tensors, and gradients alike. Collective: see `keras_dist.grouped_allreduce`."""

    def back(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reduction.check_differentiable()
        return reduce_with_gradient(reduction, *gradients)

    return differentiable(functools.partial(reduce_tensors, reduction), back, *tensors)


def reduce_tensor(tensor: torch.Tensor, *options: Any) -> torch.Tensor:
    """Reduces a tensor. Collective: see `keras_dist.allreduce`."""
    if is_on_device(tensor):
        return reduce_tensors(Reduction(*options), tensor)[0]
    return to_torch(ops.allreduce(to_numpy(tensor), *options), tensor)


def write_back(array: np.ndarray, tensor: torch.Tensor) -> torch.Tensor:
    """Writes `to_numpy(tensor)` into the tensor, unless it is a view of the tensor."""
    if tensor.data_ptr() != array.ctypes.data:
        return write_into(tensor, array)
    if not tensor.is_inference():  # which has no version
        torch.autograd.graph.increment_version(tensor)  # autograd must know of the write
    return tensor
