"""What a rank has: its GPU, and the libraries to use it by."""

import dataclasses

from keras_dist import errors
from keras_dist._gpu.nccl import Nccl, load_nccl
from keras_dist._gpu.runtime import load_runtime

_selected = ""  # PCI bus id


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """The GPU of a rank."""

    bus_id: str = ""
    version: int = 0
    path: str = ""
    reason: str = "it has no GPU"


def facts_of(device: int | None) -> GpuFacts:
    """Returns the facts about the GPU of this rank, and selects it for the engine."""
    global _selected
    _selected = ""
    runtime = None if device is None else load_runtime(device)
    if device is None:
        return GpuFacts()
    if runtime is None:
        return GpuFacts(reason="there is neither CUDA's runtime nor HIP's")
    if runtime.count() <= device:
        return GpuFacts(reason=f"the driver shows {runtime.count()} GPUs")
    try:  # an error here must not keep this rank from telling the others
        _selected = runtime.bus_id(device)
        nccl = load_nccl()
        if not isinstance(nccl, Nccl):
            return GpuFacts(_selected, reason=nccl)
        return GpuFacts(_selected, nccl.version(), nccl.path, "")
    except errors.BackendError as error:
        return GpuFacts(reason=str(error))


def selected_bus_id() -> str:
    """Returns the PCI bus id of the GPU that this process has selected; empty if there is none."""
    return _selected
