"""The GPU of a JAX process, and arrays as the engine takes them: in place, on the host or the GPU.

The choice of the GPU precedes the creation of JAX's client, which allocates memory on all visible
GPUs. The engine writes to new arrays only: those of JAX are immutable, and a gradient may share its
memory with a weight. JAX does not tell the stream of an array. Its DLPack protocol takes a stream,
but not every GPU client of XLA orders its work after that stream. So the host waits for an array
before the engine uses it, and until it has been written before JAX does.
"""

import ctypes
import ctypes.util
import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_dist._compat.jax import has_client, restrict_to_device, visible_devices
from keras_dist._gpu import DeviceArray, counts_host_memory, load_runtime, uniform

# By platform of JAX: the library of the driver, and its functions to start and to count GPUs.
DRIVERS = {
    "cuda": ("cuda", "cuInit", "cuDeviceGetCount"),
    "rocm": ("amdhip64", "hipInit", "hipGetDeviceCount"),
}


def choose_gpu(local_rank: int, local_size: int) -> str | None:
    """Makes JAX see the local rank's GPU alone if ranks share a node; of a client, the default."""
    if jax.config.jax_default_device is not None:
        return None
    if has_client():
        return _choose_default(local_rank, local_size)
    platform = next(filter(_may_use, DRIVERS), None)
    if platform is None:
        return None
    if visible_devices(platform) != "all":
        return None
    count = _count(platform)
    if count is None:
        return _choose_default(local_rank, local_size)
    if local_size > 1 and count > 1:
        restrict_to_device(platform, local_rank % count)
    return _ranks_per_device(local_size, count)


def number_of_gpu() -> int | None:
    """Returns the GPU of this process among those of the driver, if any; creates no client."""
    default = jax.config.jax_default_device
    if default is not None or has_client():
        gpus = [default] if isinstance(default, jax.Device) else _gpus_of_client()
        is_gpu = bool(gpus) and gpus[0].platform != "cpu"
        return int(gpus[0].local_hardware_id) if is_gpu else None
    platform = next(filter(_may_use, DRIVERS), None)
    if platform is None or not _count(platform):
        return None
    visible = visible_devices(platform)
    return 0 if visible == "all" else int(visible.split(",")[0])


def _choose_default(local_rank: int, local_size: int) -> str | None:
    gpus = _gpus_of_client()
    if not gpus:
        return None
    jax.config.update("jax_default_device", gpus[local_rank % len(gpus)])
    if len(gpus) > 1 and local_size > 1:
        return (
            f"allocates memory on each of {len(gpus)} GPUs, as do the other ranks of this node, "
            "since JAX was used before keras_dist.init(). Call init() before any use of JAX."
        )
    return _ranks_per_device(local_size, len(gpus))


def _ranks_per_device(local_size: int, count: int) -> str | None:
    if 1 < count < local_size:
        return f"shares its GPU: {local_size} ranks on this node, {count} GPUs."
    return None


def _gpus_of_client() -> list[Any]:
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def _may_use(platform: str) -> bool:
    """Returns whether JAX has a plugin for a GPU platform, and may use it."""
    chosen = jax.config.jax_platforms
    if chosen and not {platform, "gpu"} & set(chosen.split(",")):
        return False
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(platform in plugin.name for plugin in plugins)


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(f"lib{name}.so.1")
    except OSError:  # another version; find_library forks, which some MPI libraries do not support
        return ctypes.CDLL(ctypes.util.find_library(name) or f"lib{name}.so")


def _count(platform: str) -> int | None:
    """Returns how many GPUs a driver shows, without a context on them; `None` if it is missing."""
    name, start, count_devices = DRIVERS[platform]
    count = ctypes.c_int(0)
    try:
        driver = _load(name)
        started = getattr(driver, start)(0) == 0
        counted = started and getattr(driver, count_devices)(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return None
    return count.value if counted else None


def to_array(array: Any) -> np.ndarray | DeviceArray:
    """Returns an array of JAX as an array of the engine, without a copy."""
    return _device_array(array) if _is_on_device(array) else np.asarray(array)


def place_of(array: Any) -> Any:
    """Returns where a result belongs that replaces an array; `None` leaves it to JAX."""
    # A result is committed to a device only if the array is. Otherwise the second step would
    # receive committed weights and be compiled again.
    return array.sharding if array.committed else None


def to_jax(result: np.ndarray | DeviceArray, place: Any) -> Any:
    """Returns an array of the engine as an array of JAX, without a copy; see `place_of`."""
    if isinstance(result, DeviceArray):
        return result.finish(None)
    return jax.device_put(result, place, may_alias=True)


def _is_on_device(array: Any) -> bool:
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) > 1:
        return False
    (device,) = array.sharding.device_set
    return counts_host_memory() or (device.platform != "cpu" and load_runtime() is not None)


def _device_array(array: Any) -> DeviceArray:
    def allocate(shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        place = place_of(array)
        return _device_array(jax.numpy.zeros(shape, dtype, device=place))

    array.block_until_ready()
    address = array.unsafe_buffer_pointer() if math.prod(array.shape) else 0
    return DeviceArray(address, array.shape, np.dtype(array.dtype), array, allocate)


def engine_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Returns tensors as arrays of the engine."""
    return uniform([to_array(tensor) for tensor in tensors])
