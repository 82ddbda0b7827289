"""Differentiable data movement of tensors: `allgather`, `alltoall`, `broadcast`."""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import ops, runtime
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.reduce_op import Average
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch import sync_ops


@raises_on_all
@described_by(ops.allgather)
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The gradient is this rank's rows of the gradients averaged over ranks, as in Horovod."""
    return grouped_allgather([tensor], name, process_set)[0]


@raises_on_all
@described_by(ops.grouped_allgather)
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """The gradient is that of `allgather`."""
    return list(_Allgather.apply(name, process_set, *tensors))


@raises_on_all
@described_by(ops.alltoall)
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The gradient sends the rows back.

    Returns:
        New tensor: the rows from rank 0, then from rank 1, and so on. With `splits`, a pair: that
        tensor, and the number of rows from each rank, int32 of shape (number of ranks,).
    """
    rows, received = _Alltoall.apply(name, process_set, tensor, splits)
    return rows if splits is None else (rows, received)


@raises_on_all
@described_by(ops.broadcast)
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The gradient on the root is the average over ranks, on other ranks zero, as in Horovod.

    Args:
        root_rank: rank in the job that sends its tensor, also in a process set.
    """
    return _Broadcast.apply(root_rank, name, process_set, tensor)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.process_set = name, process_set
        ctx.lengths = [len(tensor) if tensor.ndim else 0 for tensor in tensors]
        return tuple(sync_ops.grouped_allgather(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        averaged = sync_ops.grouped_allreduce(
            gradients, name=ctx.name, op=Average, process_set=ctx.process_set
        )
        lengths = sync_ops.allgather(torch.tensor([ctx.lengths]), ctx.name, ctx.process_set)
        rank = runtime.communicator(ctx.process_set).rank
        starts = lengths[:rank].sum(0).tolist()
        return (
            None,
            None,
            *(
                gradient[start : start + length]
                for gradient, start, length in zip(averaged, starts, ctx.lengths, strict=True)
            ),
        )


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, tensor: torch.Tensor, splits: Any
    ) -> Any:
        ctx.name, ctx.process_set, ctx.shape = name, process_set, tensor.shape
        rows, ctx.received = sync_ops.exchange_rows(tensor, splits, name, process_set)
        ctx.mark_non_differentiable(ctx.received)
        return rows, ctx.received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        rows, _ = sync_ops.exchange_rows(
            gradient.contiguous(), ctx.received, ctx.name, ctx.process_set
        )
        full = gradient.new_zeros(ctx.shape)  # rows beyond the sum of the splits were not sent
        full[: len(rows)] = rows
        return None, None, full, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, root_rank: int, name: str | None, process_set: ProcessSet, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return sync_ops.broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        averaged = sync_ops.allreduce(
            gradient, name=ctx.name, op=Average, process_set=ctx.process_set
        )
        is_root = runtime.rank() == ctx.root_rank
        return None, None, None, averaged if is_root else torch.zeros_like(averaged)
