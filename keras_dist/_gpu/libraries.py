"""The libraries of a GPU: those that a framework has loaded, those of wheels, or the system's.

Each is a table of C functions: their addresses by name. Tests put another table in its place, whose
functions are callbacks; the declarations and calls remain the same.
"""

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Only tests set it: a Python file with functions `nccl()` and `runtime()`, which return the
# addresses of functions by name. Arrays on the host then count as arrays of a GPU.
DOUBLE = "_KERAS_DIST_GPU_DOUBLE"

# By kind: the prefix of the names of functions, the sonames, newest first, and the folders of
# wheels below `nvidia`.
_CUDA = ("cuda", ("libcudart.so.13", "libcudart.so.12"), ("cu13/lib", "cuda_runtime/lib"))
_HIP = ("hip", ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"), ())
_NCCL = ("nccl", ("libnccl.so.2",), ("nccl/lib",))
_RCCL = ("nccl", ("librccl.so.1", "librccl.so"), ())

KINDS = {"runtime": (_CUDA, _HIP), "nccl": (_NCCL, _RCCL)}


class Table:
    """The functions of a library, by name."""

    def __init__(self, path: str, prefix: str, address_of: Callable[[str], int]):
        self.path, self.prefix, self._address_of = path, prefix, address_of

    def function(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        """Returns a function that releases the interpreter lock while it runs."""
        return ctypes.CFUNCTYPE(result, *arguments)(self._address_of(name))


@functools.cache
def find(kind: str) -> Table | None:
    """Returns a library of the GPU; `None` if there is none."""
    double = _double()
    if double is not None:
        addresses = getattr(double, kind)()
        prefix = "cuda" if kind == "runtime" else "nccl"
        return Table(str(double.__file__), prefix, lambda name: _named(addresses, name))
    for prefix, sonames, folders in KINDS[kind]:
        for path, mode in _candidates(sonames, folders):
            try:
                library = ctypes.CDLL(path, mode=mode)
            except OSError:
                continue
            return Table(_path_of(path), prefix, functools.partial(_address, library))
    return None


def missing(kind: str) -> str:
    """Returns what to install where `find` finds no library."""
    sonames = [soname for _, names, _ in KINDS[kind] for soname in names[:1]]
    package = {"runtime": "nvidia-cuda-runtime", "nccl": "nvidia-nccl-cu13"}[kind]
    return f"{' or '.join(sonames)}, as in the package {package}"


def counts_host_memory() -> bool:
    """Returns whether arrays on the host count as arrays of a GPU, as only tests have it."""
    return _double() is not None


def _candidates(sonames: tuple[str, ...], folders: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yields paths and modes: what is loaded, then the files of wheels, then the system's."""
    for soname in sonames:
        yield soname, os.RTLD_NOLOAD | ctypes.DEFAULT_MODE
    # The packages of NVIDIA share the namespace `nvidia`.
    for root in dict.fromkeys(map(Path, sys.path)):
        for folder in folders:
            for soname in sonames:
                path = root / "nvidia" / folder / soname
                if path.is_file():
                    yield str(path), ctypes.DEFAULT_MODE
    for soname in sonames:
        yield soname, ctypes.DEFAULT_MODE


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _named(addresses: dict[str, int], name: str) -> int:
    if name not in addresses:
        raise AttributeError(name)
    return addresses[name]


def _path_of(path: str) -> str:
    """Returns the file of a loaded library, if the system tells it."""
    if os.path.isabs(path):
        return path
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return path
    return next((line.split()[-1] for line in lines if line.endswith(path)), path)


@functools.cache
def _double() -> Any | None:
    path = os.environ.get(DOUBLE)
    if not path:
        return None
    spec = importlib.util.spec_from_file_location("keras_dist_gpu_double", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
