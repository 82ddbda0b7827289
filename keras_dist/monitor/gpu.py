"""The GPU of a rank, as NVIDIA's management library (NVML) reports it."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

MIG = "MIG-"  # prefix of the names of instances of a partitioned GPU
PLACE_LENGTH = 12  # of such a name, in tables


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The state of a GPU, other processes included."""

    name: str
    use: float | None
    memory_nbytes: int
    memory_total_nbytes: int
    place: str = ""


def gpu_of(local_rank: int, bus_id: str = "") -> Gpu | None:
    """Returns the GPU of a rank; `None` without one of NVIDIA, its driver or `nvidia-ml-py`."""
    nvml = _library()
    if nvml is None:
        return None
    try:
        handles = _handles(nvml)
        if not handles:
            return None
        place, handle = handles[local_rank % len(handles)]
        if bus_id and not place.startswith(MIG):
            handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
            place = str(nvml.nvmlDeviceGetIndex(handle))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name, use = nvml.nvmlDeviceGetName(handle), None
        with contextlib.suppress(nvml.NVMLError):  # a MIG instance has none
            use = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        return Gpu(name, use, memory.used, memory.total, place)
    except nvml.NVMLError:
        return None


def visible(
    count: int, uuids: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[int | str]:
    """Returns the GPUs of a node that its processes see, in their order."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    found: list[int | str] = []
    for word in filter(None, map(str.strip, text.split(","))):
        if word.startswith(MIG):
            return found or [word]
        by_uuid = [number for number, uuid in enumerate(uuids) if uuid.startswith(word)]
        number = int(word) if word.isdecimal() else next(iter(by_uuid), -1)
        if not 0 <= number < count:
            break  # CUDA ignores what follows an invalid entry
        found.append(number)
    return found


@functools.cache
def _library() -> Any | None:
    with contextlib.suppress(ImportError):
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return pynvml
    return None


@functools.cache
def _handles(nvml: Any) -> list[tuple[str, Any]]:
    """Returns the place and the handle of each GPU that this process sees."""
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
    found = visible(count, list(map(nvml.nvmlDeviceGetUUID, handles)))
    return [
        (str(gpu), handles[gpu])
        if isinstance(gpu, int)
        else (gpu[:PLACE_LENGTH], nvml.nvmlDeviceGetHandleByUUID(gpu.encode()))
        for gpu in found
    ]
