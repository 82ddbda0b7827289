"""Collectives of tensors without gradients, blocking: what the other forms are made of.

A tensor on the CPU is read in place; a tensor on a GPU is staged in pinned memory of the host.
"""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import ops
from keras_dist._backends.torch_tensors import (
    rows_of,
    sparse_of,
    to_numpy,
    to_torch,
    write_into,
)
from keras_dist.ops.arguments import chosen_op
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_all",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
    "sparse_allreduce",
]

Tensors = Sequence[torch.Tensor]


@raises_on_all
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> torch.Tensor:
    """Combines the tensors of all ranks into one. See `keras_dist.torch.allreduce`."""
    factors = prescale_factor, postscale_factor
    how = chosen_op(op, average), *factors, process_set, compression
    return grouped_allreduce([tensor], None, name, *how)[0]


@raises_on_all
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Does `allreduce` and writes the result into the tensor, which is returned."""
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    return grouped_allreduce_([tensor], None, name, *how)[0]


@raises_on_all
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> list[torch.Tensor]:
    """Does `allreduce` for a list of tensors at once: small ones travel together."""
    how = chosen_op(op, average), name, prescale_factor, postscale_factor, process_set
    given = [to_numpy(tensor) for tensor in tensors]
    arrays = ops.grouped_allreduce(given, *how, compression)
    return [to_torch(array, like) for array, like in zip(arrays, tensors, strict=True)]


@raises_on_all
def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Does `grouped_allreduce` and writes the results into the tensors, which are returned."""
    how = chosen_op(op, average), name, prescale_factor, postscale_factor, process_set
    arrays = ops.grouped_allreduce([to_numpy(tensor) for tensor in tensors], *how)
    return [write_into(tensor, array) for tensor, array in zip(tensors, arrays, strict=True)]


@raises_on_all
def sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines sparse tensors, as the gradient of an embedding; rows of equal index are added up.

    Collective: every rank; blocks. See `keras_dist.sparse_allreduce`.

    Args:
        tensor: a sparse COO tensor.
        name: a name, by which calls that ranks make in different orders find each other.
        op: `Average` or `Sum`, or its name. Defaults to `Average`.
        process_set: the ranks that take part. Defaults to all.

    Returns:
        A sparse tensor of the same shape.
    """
    own = tensor.coalesce()
    return sparse_of(*ops.sparse_allreduce(*rows_of(own), op, name, process_set), own)


@raises_on_all
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Gives each rank its rows of the reduction. See `keras_dist.torch.reducescatter`."""
    how = op, process_set, prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, *how)[0]


@raises_on_all
def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Does `reducescatter` for a list of tensors at once: they travel together."""
    how = op, name, prescale_factor, postscale_factor, process_set
    arrays = ops.grouped_reducescatter([to_numpy(tensor) for tensor in tensors], *how)
    return [to_torch(array, like) for array, like in zip(arrays, tensors, strict=True)]


@raises_on_all
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Joins the tensors of all ranks, in rank order. See `keras_dist.torch.allgather`."""
    return grouped_allgather([tensor], name, process_set)[0]


@raises_on_all
def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Does `allgather` for a list of tensors at once: they travel together."""
    arrays = [to_numpy(tensor) for tensor in tensors]
    joined = ops.grouped_allgather(arrays, name, process_set)
    return [to_torch(array, like) for array, like in zip(joined, tensors, strict=True)]


@raises_on_all
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows of each rank to each rank. See `keras_dist.torch.alltoall`."""
    wanted = to_numpy(splits) if isinstance(splits, torch.Tensor) else splits
    result: Any = ops.alltoall(to_numpy(tensor), wanted, name, process_set)
    if splits is None:
        return to_torch(result, tensor)
    rows, received = result
    return to_torch(rows, tensor), torch.from_numpy(received).to(torch.int32)


@raises_on_all
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the root's tensor on every rank. See `keras_dist.torch.broadcast`."""
    return to_torch(ops.broadcast(to_numpy(tensor), root_rank, name, process_set), tensor)


@raises_on_all
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Writes the root's values into the tensor of every rank, and returns it.

    Collective: every rank; shape, dtype, `root_rank` and `name` must agree; blocks.

    Args:
        tensor: a tensor, a parameter too; only the root's values count.
        root_rank: the rank whose values all receive, by its number in the job.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part. Defaults to all.
    """
    broadcast_all([tensor], root_rank, name, process_set)
    return tensor


@raises_on_all
def broadcast_all(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Does `broadcast_` for a list of tensors at once."""
    arrays = [to_numpy(tensor) for tensor in tensors]
    ops.broadcast_(arrays, root_rank, name, process_set)
    for tensor, array in zip(tensors, arrays, strict=True):
        if tensor.data_ptr() != array.ctypes.data:
            write_into(tensor, array)
        else:  # it was written where it lies; autograd must know that it has changed
            torch.autograd.graph.increment_version(tensor)
