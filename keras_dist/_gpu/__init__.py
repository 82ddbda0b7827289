"""Arrays in GPU memory, and the libraries that act on them: CUDA's runtime and NCCL, by ctypes.

Knows neither MPI nor a framework. ROCm's runtime and RCCL have the same functions, with the prefix
`hip`. Other packages use the names below and nothing else.
"""

from keras_dist._gpu.arrays import Concatenation, DeviceArray, uniform
from keras_dist._gpu.facts import GpuFacts, facts_of, selected_bus_id
from keras_dist._gpu.libraries import counts_host_memory
from keras_dist._gpu.nccl import (
    REDUCTIONS,
    Nccl,
    NcclError,
    data_type,
    load_nccl,
    version_text,
)
from keras_dist._gpu.runtime import Event, Runtime, load_runtime
from keras_dist._gpu.staging import Half, Staging, staging_of

__all__ = [
    "REDUCTIONS",
    "Concatenation",
    "DeviceArray",
    "Event",
    "GpuFacts",
    "Half",
    "Nccl",
    "NcclError",
    "Runtime",
    "Staging",
    "counts_host_memory",
    "data_type",
    "facts_of",
    "load_nccl",
    "load_runtime",
    "selected_bus_id",
    "staging_of",
    "uniform",
    "version_text",
]
