"""The GPU of a rank, as NVIDIA's management library (NVML) reports it."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Gpu", "gpu_of", "visible"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The state of a GPU, other processes included.

    Args:
        name: product name.
        use: utilization, 0 to 1.
        memory_nbytes: used memory in bytes.
        memory_total_nbytes: total memory in bytes.
    """

    name: str
    use: float
    memory_nbytes: int
    memory_total_nbytes: int


def gpu_of(local_rank: int) -> Gpu | None:
    """Returns the GPU of a rank: number `local_rank` of the visible GPUs, modulo their number.

    `None` without an NVIDIA GPU, without a driver, or without `nvidia-ml-py`.
    """
    nvml = _library()
    if nvml is None:
        return None
    try:
        handles = _handles(nvml)
        if not handles:
            return None
        handle = handles[local_rank % len(handles)]
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        use = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return Gpu(nvml.nvmlDeviceGetName(handle), use, memory.used, memory.total)
    except nvml.NVMLError:  # a MIG instance has no utilization, for example
        return None


def visible(
    count: int, uuids: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[int]:
    """Returns the GPUs of a node that its processes see, in their order.

    Args:
        count: number of GPUs of the node.
        uuids: UUIDs of the GPUs.
        environment: may hold `CUDA_VISIBLE_DEVICES`, with numbers or UUIDs.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    found = []
    for word in filter(None, map(str.strip, text.split(","))):
        by_uuid = [number for number, uuid in enumerate(uuids) if uuid.startswith(word)]
        number = int(word) if word.isdecimal() else next(iter(by_uuid), -1)
        if not 0 <= number < count:
            break  # CUDA ignores what follows an invalid entry
        found.append(number)
    return found


@functools.cache
def _library() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@functools.cache
def _handles(nvml: Any) -> list[Any]:
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
    return [
        handles[number] for number in visible(count, list(map(nvml.nvmlDeviceGetUUID, handles)))
    ]
