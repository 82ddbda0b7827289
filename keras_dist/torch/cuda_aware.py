"""Tensors of a GPU that MPI takes where they lie, without a way through the host.

It is done where `KERAS_DIST_GPU_DIRECT` asks for it and MPI says that it is CUDA-aware. It has been
run with tensors on the CPU, which go the same way through MPI, and on no GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import _engine, config, runtime
from keras_dist.ops.reduce_op import ReduceOp

__all__ = ["allreduce", "broadcast", "takes"]

# Those that MPI knows as well.
DTYPES = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64}
PLAIN = (None, _engine.Compression.none, "none")


def takes(
    tensors: Sequence[torch.Tensor], process_set: Any, op: Any = "sum", compression: Any = None
) -> bool:
    """Tells whether tensors go to MPI as they are. Ranks with like tensors come to the same.

    Args:
        tensors: what is to travel.
        process_set: among whom.
        op: the reduction, if it is one.
        compression: what numbers look like between nodes.
    """
    if not tensors or not config.settings().gpu_direct or compression not in PLAIN:
        return False
    comm = runtime.communicator(process_set)
    lies_right = all(one.device.type == "cuda" and one.dtype in DTYPES for one in tensors)
    can = comm.size > 1 and comm.recovery is None and _engine.is_cuda_aware() is True
    parsed = _engine.parse_op(op, comm.where())
    # Only the engine averages whole numbers exactly: their sum may run over.
    whole = parsed is ReduceOp.AVERAGE and any(not one.is_floating_point() for one in tensors)
    return lies_right and can and not whole and parsed is not ReduceOp.ADASUM


def allreduce(
    tensors: Sequence[torch.Tensor],
    op: Any,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: Any,
) -> list[torch.Tensor]:
    """Reduces tensors. See `plain.grouped_allreduce`; whole numbers are scaled in float64."""
    comm = runtime.communicator(process_set)
    parsed = _engine.parse_op(op, comm.where())
    averages = parsed is ReduceOp.AVERAGE
    results = [
        _scaled(one.detach(), prescale).clone(memory_format=torch.contiguous_format)
        for one in tensors
    ]
    _wait_for_gpu(results)
    adds = ReduceOp.SUM if averages else parsed
    _engine.allreduce_in_place(comm, results, _entries(name, results), adds, name)
    return [_scaled(one, postscale / (comm.size if averages else 1)) for one in results]


def broadcast(
    tensors: Sequence[torch.Tensor], root_rank: int, name: str | None, process_set: Any
) -> None:
    """Writes the root's values into tensors. See `plain.broadcast_all`."""
    comm = runtime.communicator(process_set)
    sent = [one.detach().contiguous() for one in tensors]
    _wait_for_gpu(sent)
    _engine.broadcast_in_place(comm, sent, _entries(name, sent), root_rank, name)
    with torch.no_grad():
        for tensor, values in zip(tensors, sent, strict=True):
            tensor.copy_(values)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1:
        return tensor
    wide = tensor if tensor.is_floating_point() else tensor.double()
    return (wide * factor).to(tensor.dtype)


def _wait_for_gpu(tensors: Sequence[torch.Tensor]) -> None:
    """Waits for the kernels that write them: MPI knows nothing of torch's streams."""
    for device in {one.device for one in tensors if one.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _entries(name: str | None, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    names = [name or f"tensor {number}" for number in range(len(tensors))]
    return _engine.entries_of(names, [(tuple(one.shape), one.dtype) for one in tensors])
