"""Reductions of tensors, with gradients: `allreduce`, `reducescatter` and their grouped forms."""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import _engine, errors, runtime
from keras_dist.ops.arguments import chosen_op
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.ops.tensor_compression import compressed, decompressed, wire_of
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch import sync_ops
from keras_dist.torch.compressors import Compression
from keras_dist.torch.exchange_ops import grouped_allgather

__all__ = ["allreduce", "grouped_allreduce", "grouped_reducescatter", "reducescatter"]


@raises_on_all
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
    """Combines the tensors of all ranks into one, with the same bits on each.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    The gradient of a sum or an average is that of the ranks' losses together: the same reduction
    of their gradients. Other ops have none.

    Args:
        tensor: a tensor of any numeric dtype, bfloat16 included; it stays as it is.
        average: deprecated: `True` is `op=Average`, `False` is `op=Sum`.
        name: a name, by which calls that ranks make in different orders find each other.
        compression: of `Compression`, or a class with its methods. Defaults to `Compression.none`.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`, or its name. Defaults to
            `Average`.
        prescale_factor: every rank's tensor is multiplied by it first. Defaults to 1.0.
        postscale_factor: the result is multiplied by it. Defaults to 1.0.
        process_set: the ranks that take part. Defaults to all.

    Returns:
        New tensor of the shape, dtype and device of `tensor`.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: an argument cannot be used, or both `op` and `average` are given.
    """
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    return grouped_allreduce([tensor], None, name, compression, *how)[0]


@raises_on_all
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
    """Does `allreduce` for a list of tensors at once: small ones travel together.

    Collective: as `allreduce`.

    Args:
        tensors: list of tensors; dtypes may differ.
        average: as for `allreduce`.
        name: as for `allreduce`.
        compression: as for `allreduce`.
        op: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`.

    Returns:
        List of new tensors.
    """
    small, contexts = compressed(compression, tensors)
    factors = prescale_factor, postscale_factor
    how = name, chosen_op(op, average), *factors, process_set, wire_of(compression)
    reduced = _Allreduce.apply(how, *small) if _wants_gradients(small) else _allreduce(how, small)
    return decompressed(compression, reduced, contexts)


@raises_on_all
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combines the tensors of all ranks and gives each rank its part of the rows.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    Rows are shared out in rank order; where they do not divide, the first ranks get one more. The
    gradient is an allgather of the ranks' gradients, as in Horovod times the number of ranks where
    `op` is `Sum`.

    Args:
        tensor: a tensor with at least one dimension.
        name: as for `allreduce`.
        compression: a class with the methods of `Compression`, applied to tensor and result.
        op: `Average` or `Sum`, or its name. Defaults to `Average`.
        process_set: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        New tensor: this rank's rows of the result.
    """
    how = op, process_set, prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, compression, *how)[0]


@raises_on_all
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Does `reducescatter` for a list of tensors at once: they travel together.

    Collective: as `reducescatter`.

    Args:
        tensors: list of tensors; dtypes may differ.
        name: as for `allreduce`.
        compression: as for `reducescatter`.
        op: as for `reducescatter`.
        process_set: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        List of new tensors.
    """
    small, contexts = compressed(compression, tensors)
    how = name, op, process_set, prescale_factor, postscale_factor
    return decompressed(compression, _Reducescatter.apply(how, *small), contexts)


def _wants_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd is to know of a call; for many small tensors that takes long."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _allreduce(how: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return sync_ops.grouped_allreduce(tensors, None, *how)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(_allreduce(how, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        op = _engine.parse_op(ctx.how[1], runtime.where())
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    "op to be Average or Sum where gradients are asked for",
                    op.value,
                    "Detach the tensor: this reduction has no gradient.",
                )
            )
        return None, *_Allreduce.apply(ctx.how, *gradients)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(sync_ops.grouped_reducescatter(tensors, *how))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        name, op, process_set, prescale, postscale = ctx.how
        sums = _engine.parse_op(op) is ReduceOp.SUM
        factor = prescale * postscale * (runtime.communicator(process_set).size if sums else 1)
        return None, *(factor * g for g in grouped_allgather(gradients, name, process_set))
