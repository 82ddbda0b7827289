"""Arrays in GPU memory, and the libraries that act on them: CUDA's runtime and NCCL, by ctypes.

ROCm's runtime and RCCL have the same functions, with the prefix `hip`. Other packages use the names
below and nothing else.
"""

from keras_dist._gpu.cuda import Event, Runtime, counts_host_memory, load_runtime
from keras_dist._gpu.device_arrays import (
    Concatenation,
    DeviceArray,
    Half,
    Staging,
    staging,
    uniform,
)
from keras_dist._gpu.nccl_library import (
    DATA_TYPES,
    REDUCTIONS,
    GpuFacts,
    Nccl,
    NcclError,
    facts_of,
    load_nccl,
    selected_bus_id,
    version_text,
)
