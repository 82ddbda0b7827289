"""Operations that give ranks other rows: `allgather`, `reducescatter`, `alltoall`, `broadcast`."""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import _engine, ops, runtime
from keras_dist._backends.torch_tensors import (
    differentiable,
    to_array,
    to_numpy,
    to_tensor,
    to_tensors,
    to_torch,
)
from keras_dist.ops.face import Reduction, compressed, decompressed, rows_before
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.torch.compilation import untraced, untraced_face
from keras_dist.torch.reduce_ops import (
    Compression,
    reduce_tensor,
    reduce_with_gradient,
    write_back,
)


@untraced_face(ops.allgather)
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The gradient is this rank's rows of the gradients averaged over ranks, as in Horovod."""
    return grouped_allgather([tensor], name, process_set)[0]


@untraced_face(ops.grouped_allgather)
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """The gradient is that of `allgather`."""
    lengths = [len(tensor) if tensor.ndim else 0 for tensor in tensors]

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = ops.grouped_allgather([to_array(tensor) for tensor in given], name, process_set)
        return tuple(to_tensors(gathered, given))

    def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
        averaged = reduce_with_gradient(Reduction(Average, name, 1.0, 1.0, process_set), *gradients)
        starts = rows_before(lengths, name, process_set).tolist()
        triples = zip(averaged, starts, lengths, strict=True)
        return [rows[start : start + length] for rows, start, length in triples]

    return list(differentiable(run, back, *tensors))


@untraced_face(ops.reducescatter)
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


@untraced_face(ops.grouped_reducescatter)
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

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scattered = reduction.reducescatter([to_array(tensor) for tensor in given])
        return tuple(to_tensors(scattered, given))

    def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
        gathered = grouped_allgather(gradients, name, process_set)
        return [reduction.scatter_gradient_factor * gradient for gradient in gathered]

    return decompressed(compression, differentiable(run, back, *inputs), contexts)


@untraced_face(ops.alltoall)
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
    shape = tensor.shape

    def exchange(given: torch.Tensor, counts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = to_numpy(counts) if isinstance(counts, torch.Tensor) else counts
        comm = runtime.communicator(process_set)
        rows, received = _engine.collectives.alltoall(
            comm, to_numpy(given), numbers, name or "value", name
        )
        return to_torch(rows, given), torch.from_numpy(received).to(torch.int32)

    def send_back(gradient: torch.Tensor) -> tuple[torch.Tensor]:
        rows, _ = exchange(gradient.contiguous(), received)
        full = gradient.new_zeros(shape)  # rows beyond the sum of the splits were not sent
        full[: len(rows)] = rows
        return (full,)

    def back(gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
        return differentiable(send_back, lambda again: [send(again)[0]], gradient)

    def send(given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return differentiable(lambda given: exchange(given, splits), back, given)

    rows, received = send(tensor)
    return rows if splits is None else (rows, received)


@untraced_face(ops.broadcast)
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

    def run(given: torch.Tensor) -> tuple[torch.Tensor]:
        sent = ops.broadcast(to_array(given), root_rank, name, process_set)
        return (to_tensor(sent, given),)

    def average(gradient: torch.Tensor) -> tuple[torch.Tensor]:
        averaged = reduce_tensor(gradient, Average, name, 1.0, 1.0, process_set)
        return (averaged if runtime.rank() == root_rank else torch.zeros_like(averaged),)

    def spread(gradient: torch.Tensor) -> list[torch.Tensor]:
        sent = broadcast(gradient, root_rank, name, process_set)
        return [sent / runtime.communicator(process_set).size]

    def back(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return differentiable(average, spread, gradient)

    return differentiable(run, back, tensor)[0]


@untraced_face(ops.broadcast)
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


@untraced
@raises_on_all
def broadcast_all(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Writes the root's values into a list of tensors. Collective: see `broadcast_`."""
    arrays = [to_numpy(tensor) for tensor in tensors]
    ops.broadcast_(arrays, root_rank, name, process_set)
    for tensor, array in zip(tensors, arrays, strict=True):
        write_back(array, tensor)
