"""Differentiable reductions of tensors: `allreduce`, `reducescatter` and their grouped forms."""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import ops
from keras_dist.ops.arguments import resolve_op
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.reduction_arguments import Reduction
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.ops.tensor_compression import compressed, decompressed, wire_of
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch.compressors import Compression
from keras_dist.torch.exchange_ops import grouped_allgather
from keras_dist.torch.sync_ops import reduce_scatter_tensors, reduce_tensor, reduce_tensors

NO_WIRE = wire_of(Compression.none)


@raises_on_all
@described_by(ops.allreduce)
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
    if compression is Compression.none and not (torch.is_grad_enabled() and tensor.requires_grad):
        factors = prescale_factor, postscale_factor
        return reduce_tensor(tensor, chosen, name, *factors, process_set, NO_WIRE)
    return grouped_allreduce(
        [tensor],
        name=name,
        compression=compression,
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )[0]


@raises_on_all
@described_by(ops.grouped_allreduce)
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
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    # Autograd is slow for many small tensors.
    reduce = _Allreduce.apply if differentiable else reduce_tensors
    return decompressed(compression, reduce(reduction, *inputs), contexts)


@raises_on_all
@described_by(ops.reducescatter)
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """The gradient is an allgather; for `Sum` times the number of ranks, as in Horovod.

    Args:
        compression: as in `allreduce`; a wire format has no effect.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


@raises_on_all
@described_by(ops.grouped_reducescatter)
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """The gradient is that of `reducescatter`.

    Args:
        compression: as in `reducescatter`.
    """
    inputs, contexts = compressed(compression, tensors)
    reduction = Reduction(op, name, prescale_factor, postscale_factor, process_set)
    return decompressed(compression, _Reducescatter.apply(reduction, *inputs), contexts)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduction: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.reduction = reduction
        return reduce_tensors(reduction, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.reduction.check_differentiable()
        return None, *_Allreduce.apply(ctx.reduction, *gradients)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduction: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.reduction = reduction
        return reduce_scatter_tensors(reduction, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        reduction: Reduction = ctx.reduction
        gathered = grouped_allgather(gradients, reduction.name, reduction.process_set)
        return None, *(reduction.scatter_gradient_factor * gradient for gradient in gathered)
