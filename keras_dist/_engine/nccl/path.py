"""The path of arrays in GPU memory, by NCCL or the host, which all ranks find without a message."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._gpu import DATA_TYPES, DeviceArray, GpuFacts, version_text

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator

NCCL = "NCCL"  # in signatures of operations

_log = logging.getLogger("keras_dist")


@dataclasses.dataclass(frozen=True)
class GpuPath:
    """The path of arrays in GPU memory."""

    uses_nccl: bool
    reason: str

    def __str__(self) -> str:
        way = "by NCCL" if self.uses_nccl else "through pinned host memory"
        return f"{way}: {self.reason}"


def choose_path(
    setting: str, gpus: Sequence[GpuFacts], ranks: Sequence[int], shares: bool
) -> GpuPath:
    """Returns the path of arrays of some ranks."""
    if setting == "host":
        return GpuPath(False, "KERAS_DIST_GPU=host")
    reason = _reason(gpus, ranks, shares)
    if reason is None:
        version = version_text(gpus[0].version)
        return GpuPath(True, f"version {version}, {len(gpus)} ranks")
    if setting == "nccl":
        raise errors.LaunchError(
            "[keras_dist.init]",
            "NCCL to be usable on all ranks (KERAS_DIST_GPU=nccl)",
            reason,
            "Install the same NCCL on every rank and start one rank for each GPU, or set "
            "KERAS_DIST_GPU=auto.",
        )
    return GpuPath(False, reason)


def _reason(gpus: Sequence[GpuFacts], ranks: Sequence[int], shares: bool) -> str | None:
    for rank, gpu in zip(ranks, gpus, strict=True):
        if gpu.reason:
            return f"rank {rank}: {gpu.reason}"
    first, users = gpus[0], dict[tuple[str, str], int]()
    for rank, gpu in zip(ranks, gpus, strict=True):
        if gpu.version != first.version:
            versions = version_text(gpu.version), version_text(first.version)
            return f"rank {rank} has NCCL {versions[0]}, rank {ranks[0]} {versions[1]}"
        other = users.setdefault((gpu.node, gpu.bus_id), rank)
        if other != rank and not shares:
            return f"ranks {other} and {rank} share GPU {gpu.bus_id} of {gpu.node}"
    return None


def set_gpus(comm: "Communicator", gpus: Sequence[GpuFacts], setting: str, shares: bool) -> None:
    """Sets the GPUs of all ranks of a job."""
    comm.gpus, comm.gpu_options = tuple(gpus), (setting, shares)
    # At once: after the death of a rank, the others are renumbered.
    comm.gpu_path = choose_path(setting, comm.gpus, comm.ranks, shares)


def path_of(comm: "Communicator") -> GpuPath:
    """Returns the path of arrays of a communicator; the same on all its ranks."""
    if comm.gpu_path is None:
        job = comm.job
        if not job.gpus:
            comm.gpu_path = GpuPath(False, "the GPUs of the ranks are unknown")
        else:
            gpus = [job.gpus[rank] for rank in comm.ranks]
            setting, shares = job.gpu_options
            comm.gpu_path = choose_path(setting, gpus, comm.ranks, shares)
    return comm.gpu_path


def is_defined(op: ReduceOp, dtype: np.dtype, factor: float) -> bool:
    """Returns whether NCCL defines a reduction as the engine does."""
    # Adasum is not one of NCCL's. Its average of integers overflows, and it has no code for some
    # dtypes. A factor must be exact in the dtype of the sum.
    if dtype.name not in DATA_TYPES or op is ReduceOp.ADASUM:
        return False
    if dtype.kind == "c":
        return op in (ReduceOp.SUM, ReduceOp.AVERAGE)
    if dtype.kind in "iub":
        return op is not ReduceOp.AVERAGE and factor == 1
    if factor == 1:
        return True
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return False
    return dtype.itemsize >= 4 or float(np.array(factor, dtype)) == factor


def are_on_device(arrays: Any) -> bool:
    """Returns whether arrays are in GPU memory."""
    return isinstance(arrays, list | tuple) and bool(arrays) and isinstance(arrays[0], DeviceArray)


def uses_nccl(comm: "Communicator") -> bool:
    """Returns whether arrays in GPU memory travel by NCCL; says once which way and why."""
    path = path_of(comm)
    if not comm.job.tells_gpu_path:
        comm.job.tells_gpu_path = True
        if comm.job.rank == 0 and comm.size > 1:
            _log.warning("keras_dist reduces arrays of GPUs %s.", path)
    return path.uses_nccl and comm.size > 1


def on_gpu(results: Sequence[Any], like: Sequence[DeviceArray]) -> list[DeviceArray]:
    """Returns results in GPU memory: some may be on the host, as those of another rank are."""
    return [
        result if isinstance(result, DeviceArray) else array.from_host(result)
        for result, array in zip(results, like, strict=True)
    ]
