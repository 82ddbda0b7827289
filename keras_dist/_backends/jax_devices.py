"""Which GPU JAX uses: chosen before JAX makes a client, which takes memory on all that it sees.

Knows of a rank its place on its node alone.
"""

import ctypes
import ctypes.util
import importlib.metadata
from typing import Any

import jax

from keras_dist._compat.jax import has_client, see_only, visible_devices

__all__ = ["choose_gpu"]

# By JAX' name of a platform: the library of its driver, and what starts it and counts its GPUs.
DRIVERS = {
    "cuda": ("cuda", "cuInit", "cuDeviceGetCount"),
    "rocm": ("amdhip64", "hipInit", "hipGetDeviceCount"),
}


def choose_gpu(local_rank: int, local_size: int) -> str | None:
    """Makes the GPU of the local rank the only one that JAX sees, where several ranks share a node.

    Where JAX has made its client already, makes it the default device instead.

    Returns:
        As `Backend.pin_device`.
    """
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
        see_only(platform, local_rank % count)
    return _sharing(local_size, count)


def _choose_default(local_rank: int, local_size: int) -> str | None:
    gpus = _gpus_of_client()
    if not gpus:
        return None
    jax.config.update("jax_default_device", gpus[local_rank % len(gpus)])
    if len(gpus) > 1 and local_size > 1:
        return (
            f"takes memory on each of {len(gpus)} GPUs, as do the other ranks of this node, since "
            "JAX was used before keras_dist.init(). Call it before anything else uses JAX."
        )
    return _sharing(local_size, len(gpus))


def _sharing(local_size: int, count: int) -> str | None:
    if 1 < count < local_size:
        return f"shares its GPU: {local_size} ranks on this node, {count} GPUs."
    return None


def _gpus_of_client() -> list[Any]:
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def _may_use(platform: str) -> bool:
    """Tells whether JAX has a plugin for a platform of GPUs, and may use it."""
    chosen = jax.config.jax_platforms
    if chosen and not {platform, "gpu"} & set(chosen.split(",")):
        return False
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(platform in plugin.name for plugin in plugins)


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(f"lib{name}.so.1")
    except OSError:  # another version; the search forks, which some MPI libraries do not like
        return ctypes.CDLL(ctypes.util.find_library(name) or f"lib{name}.so")


def _count(platform: str) -> int | None:
    """Returns how many GPUs a driver shows to this process; `None` where it cannot be asked.

    The driver makes no context on a GPU for that, and respects `CUDA_VISIBLE_DEVICES` and the like.
    """
    name, start, count_devices = DRIVERS[platform]
    count = ctypes.c_int(0)
    try:
        driver = _load(name)
        started = getattr(driver, start)(0) == 0
        asked = started and getattr(driver, count_devices)(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return None
    return count.value if asked else None
