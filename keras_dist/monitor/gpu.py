"""The GPU of a rank as NVIDIA's management library (NVML) sees it, where there is one."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Gpu", "gpu_of", "visible"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, with whatever else runs on it.

    Args:
        name: as its maker calls it.
        use: from 0 to 1, the share of the last moment in which it computed.
        memory_nbytes: used on it.
        memory_total_nbytes: that it has.
    """

    name: str
    use: float
    memory_nbytes: int
    memory_total_nbytes: int


def gpu_of(local_rank: int) -> Gpu | None:
    """Returns the GPU that a rank takes on its node, those that are visible dealt out in turn.

    `None` where there is no NVIDIA GPU, no driver, or no `nvidia-ml-py`.
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
    except nvml.NVMLError:  # a part of a GPU (MIG) has no figure for its use, for example
        return None


def visible(
    count: int, uuids: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[int]:
    """Returns which GPUs of a node are visible to its processes, in their order.

    Args:
        count: how many the node has.
        uuids: what they are called.
        environment: in which `CUDA_VISIBLE_DEVICES` may name some, by number or UUID.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    found = []
    for word in filter(None, map(str.strip, text.split(","))):
        by_name = [place for place, uuid in enumerate(uuids) if uuid.startswith(word)]
        place = int(word) if word.isdecimal() else next(iter(by_name), -1)
        if not 0 <= place < count:
            break  # CUDA sees none behind one that is not there
        found.append(place)
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
    return [handles[place] for place in visible(count, list(map(nvml.nvmlDeviceGetUUID, handles)))]
