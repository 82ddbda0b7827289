"""Blocking collectives of tensors without gradients, which the other forms use.

A tensor is read in place, on the host or, where NCCL moves it, in GPU memory.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from keras_dist import _engine, ops, runtime
from keras_dist._backends.torch_device import is_on_device, to_array, to_tensor, to_tensors
from keras_dist._backends.torch_tensors import (
    rows_of,
    sparse_of,
    to_numpy,
    to_torch,
    write_all,
    write_into,
)
from keras_dist.ops.arguments import resolve_op
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.reduction_arguments import Reduction
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set

Tensors = Sequence[torch.Tensor]


def reduce_tensors(reduction: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reduces tensors. Collective: see `keras_dist.grouped_allreduce`."""
    arrays = reduction.allreduce([to_array(tensor) for tensor in tensors])
    found = tuple(to_tensors(arrays, tensors))
    if len(found) < 2 or not is_on_device(found[0]):
        return found
    own = tuple(map(torch.empty_like, found))  # those found are views of one tensor
    write_all(own, found)
    return own


def reduce_tensor(tensor: torch.Tensor, *options: Any) -> torch.Tensor:
    """Reduces a tensor. Collective: see `keras_dist.allreduce`."""
    if is_on_device(tensor):
        return reduce_tensors(Reduction(*options), tensor)[0]
    return to_torch(ops.allreduce(to_numpy(tensor), *options), tensor)


def reduce_scatter_tensors(
    reduction: Reduction, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Reduces and scatters tensors. Collective: see `keras_dist.grouped_reducescatter`."""
    arrays = reduction.reducescatter([to_array(tensor) for tensor in tensors])
    return tuple(to_tensor(array, like) for array, like in zip(arrays, tensors, strict=True))


@raises_on_all
@described_by(ops.allreduce)
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """No gradient."""
    chosen = resolve_op(op, average)
    return reduce_tensor(tensor, chosen, name, prescale_factor, postscale_factor, process_set)


@raises_on_all
@described_by(ops.allreduce)
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
    return _write_back(ops.allreduce(array, *options, out=array), tensor)


@raises_on_all
@described_by(ops.grouped_allreduce)
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """No gradient."""
    chosen = resolve_op(op, average)
    reduction = Reduction(chosen, name, prescale_factor, postscale_factor, process_set)
    return list(reduce_tensors(reduction, *tensors))


@raises_on_all
@described_by(ops.grouped_allreduce)
def grouped_allreduce_(
    tensors: Tensors,
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
    write_all(
        tensors, [to_tensor(array, like) for array, like in zip(arrays, tensors, strict=True)]
    )
    return list(tensors)


@raises_on_all
@described_by(ops.sparse_allreduce)
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


@raises_on_all
@described_by(ops.reducescatter)
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """No gradient."""
    reduction = Reduction(op, name, prescale_factor, postscale_factor, process_set)
    return reduce_scatter_tensors(reduction, tensor)[0]


@raises_on_all
@described_by(ops.grouped_reducescatter)
def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """No gradient."""
    reduction = Reduction(op, name, prescale_factor, postscale_factor, process_set)
    return list(reduce_scatter_tensors(reduction, *tensors))


@raises_on_all
@described_by(ops.allgather)
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """No gradient."""
    return grouped_allgather([tensor], name, process_set)[0]


@raises_on_all
@described_by(ops.grouped_allgather)
def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """No gradient."""
    arrays = [to_array(tensor) for tensor in tensors]
    gathered = ops.grouped_allgather(arrays, name, process_set)
    return [to_tensor(array, like) for array, like in zip(gathered, tensors, strict=True)]


@raises_on_all
@described_by(ops.alltoall)
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """No gradient. The numbers of rows are int32."""
    rows, received = exchange_rows(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def exchange_rows(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows from all ranks and their numbers. Collective: see `alltoall`."""
    counts = to_numpy(splits) if isinstance(splits, torch.Tensor) else splits
    rows, received = _engine.collectives.alltoall(
        runtime.communicator(process_set), to_numpy(tensor), counts, name or "value", name
    )
    return to_torch(rows, tensor), torch.from_numpy(received).to(torch.int32)


@raises_on_all
@described_by(ops.broadcast)
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """No gradient."""
    return to_tensor(ops.broadcast(to_array(tensor), root_rank, name, process_set), tensor)


@raises_on_all
@described_by(ops.broadcast)
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The root's values are written into the tensor of every rank, in place.

    Args:
        tensor: a tensor or a parameter; its values are ignored on ranks other than the root.
        root_rank: rank in the job that sends its tensor, also in a process set.

    Returns:
        `tensor`.
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
    """Writes the root's values into a list of tensors. Collective: see `broadcast_`."""
    arrays = [to_numpy(tensor) for tensor in tensors]
    ops.broadcast_(arrays, root_rank, name, process_set)
    for tensor, array in zip(tensors, arrays, strict=True):
        _write_back(array, tensor)


def _write_back(array: np.ndarray, tensor: torch.Tensor) -> torch.Tensor:
    """Writes `to_numpy(tensor)` into the tensor, unless it is a view of the tensor."""
    if tensor.data_ptr() != array.ctypes.data:
        return write_into(tensor, array)
    torch.autograd.graph.increment_version(tensor)  # written in place, which autograd must record
    return tensor
