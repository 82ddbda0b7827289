"""Tensors that go from rank to rank as they are, with gradients."""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import runtime
from keras_dist.ops.reduce_op import Average
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch import sync_ops

__all__ = ["allgather", "alltoall", "broadcast", "grouped_allgather"]


@raises_on_all
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Joins the tensors of all ranks along their first dimension, in rank order.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    The gradient is, as in Horovod, this rank's rows of the average of the ranks' gradients.

    Args:
        tensor: a tensor with at least one dimension; its length may differ from rank to rank.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part. Defaults to all.

    Returns:
        New tensor whose length is the sum of the ranks' lengths.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `tensor` is a scalar.
    """
    return grouped_allgather([tensor], name, process_set)[0]


@raises_on_all
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Does `allgather` for a list of tensors at once: they travel together.

    Collective: as `allgather`.

    Args:
        tensors: list of tensors; dtypes may differ.
        name: as for `allgather`.
        process_set: as for `allgather`.

    Returns:
        List of new tensors.
    """
    return list(_Allgather.apply((name, process_set), *tensors))


@raises_on_all
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows of each rank to each rank. Its gradient sends their gradients back.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Args:
        tensor: a tensor with at least one dimension: its first rows go to rank 0, the next to
            rank 1, and so on.
        splits: how many rows each rank gets: one whole number a rank. Defaults to equal numbers,
            for which the length must divide by the number of ranks.
        name: as for `allgather`.
        process_set: as for `allgather`.

    Returns:
        New tensor: the rows from rank 0, then from rank 1, and so on. With `splits` a pair: that
        tensor, and how many rows came from each rank, int32.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `tensor` is a scalar, or `splits` do not fit it; raised on every rank.
    """
    result = _Alltoall.apply((name, process_set), tensor, splits)
    return result[0] if splits is None else result


@raises_on_all
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the root's tensor on every rank.

    Collective: every rank; shape, dtype, `root_rank` and `name` must agree; blocks.

    The gradient is, as in Horovod, the average of the ranks' gradients on the root, 0 elsewhere.

    Args:
        tensor: a tensor; only the root's values count.
        root_rank: the rank whose tensor all receive, by its number in the job.
        name: as for `allgather`.
        process_set: as for `allgather`.

    Returns:
        New tensor.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not one of the ranks.
    """
    return _Broadcast.apply((root_rank, name, process_set), tensor)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how, ctx.lengths = how, [len(tensor) if tensor.ndim else 0 for tensor in tensors]
        return tuple(sync_ops.grouped_allgather(tensors, *how))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.how
        averaged = sync_ops.grouped_allreduce(
            gradients, None, name, Average, process_set=process_set
        )
        lengths = sync_ops.allgather(torch.tensor([ctx.lengths]), name, process_set)
        place = runtime.communicator(process_set).rank
        begins = lengths[:place].sum(0).tolist()
        return None, *(
            gradient[begin : begin + length]
            for gradient, begin, length in zip(averaged, begins, ctx.lengths, strict=True)
        )


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Any, tensor: torch.Tensor, splits: Any) -> Any:
        ctx.how, ctx.shape = how, tensor.shape
        if splits is None:
            ctx.received = None
            return sync_ops.alltoall(tensor, None, *how), None
        rows, received = sync_ops.alltoall(tensor, splits, *how)
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        sent = sync_ops.alltoall(gradient.contiguous(), ctx.received, *ctx.how)
        mine = sent if ctx.received is None else sent[0]
        whole = gradient.new_zeros(ctx.shape)  # rows behind the sum of the splits were not sent
        whole[: len(mine)] = mine
        return None, whole, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.how = how
        return sync_ops.broadcast(tensor, *how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        root_rank, name, process_set = ctx.how
        averaged = sync_ops.allreduce(gradient, None, name, Average, process_set=process_set)
        return None, averaged if runtime.rank() == root_rank else torch.zeros_like(averaged)
