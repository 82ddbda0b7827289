"""CUDA's runtime, or HIP's: streams, events, copies and pinned memory."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist import errors

# Only tests set it: a Python file with functions `nccl` and `runtime`, which return the address of
# a function by its name. Arrays on the host then count as arrays of a GPU.
DOUBLE = "_KERAS_DIST_GPU_DOUBLE"

# By kind: the prefix of the names of functions, the sonames, newest first, and the folders of
# wheels below `nvidia`.
_CUDA = ("cuda", ("libcudart.so.13", "libcudart.so.12"), ("cu13/lib", "cuda_runtime/lib"))
_HIP = ("hip", ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"), ())
_NCCL = ("nccl", ("libnccl.so.2",), ("nccl/lib",))
_RCCL = ("nccl", ("librccl.so.1", "librccl.so"), ())

KINDS = {"runtime": (_CUDA, _HIP), "nccl": (_NCCL, _RCCL)}
NOT_READY = 600
NON_BLOCKING = 1  # a stream that does not wait for the default stream
DISABLE_TIMING = 2
BY_ADDRESS = 4  # of a copy: the addresses tell which memory they are of
PCI_NBYTES = 32
SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3

# HIP's names, where they differ in more than the prefix.
HIP_NAMES = {"HostAlloc": "HostMalloc"}


class Table:
    """The functions of a library, by name.

    It is one that a framework has loaded, that of a wheel, or the system's. Tests put another table
    in its place, whose functions are callbacks.
    """

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
        prefix = "cuda" if kind == "runtime" else "nccl"
        return Table(str(double.__file__), prefix, getattr(double, kind))
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


class _Thread(threading.local):
    device: int | None = None  # the GPU that the thread uses


_thread = _Thread()


class Runtime:
    """The runtime of one GPU of this process."""

    def __init__(self, table: Table, device: int = 0):
        self.path, self._prefix, self.device = table.path, table.prefix, device
        handle, ptr = POINTER(c_void_p), c_void_p

        def declare(name: str, *arguments: Any, result: Any = c_int) -> Any:
            if table.prefix == "hip":
                name = HIP_NAMES.get(name, name)
            return table.function(table.prefix + name, *arguments, result=result)

        self._error_text = declare("GetErrorString", c_int, result=c_char_p)
        self._count = declare("GetDeviceCount", POINTER(c_int))
        self._set_device = declare("SetDevice", c_int)
        self._bus_id = declare("DeviceGetPCIBusId", ptr, c_int, c_int)
        self._new_stream = declare("StreamCreateWithFlags", handle, c_uint)
        self.free_stream = declare("StreamDestroy", ptr)
        self._new_event = declare("EventCreateWithFlags", handle, c_uint)
        self._record = declare("EventRecord", ptr, ptr)
        self._query = declare("EventQuery", ptr)
        self._wait = declare("StreamWaitEvent", ptr, ptr, c_uint)
        self._copy = declare("MemcpyAsync", ptr, ptr, c_size_t, c_int, ptr)
        self._pin = declare("HostAlloc", handle, c_size_t, c_uint)
        self._unused: dict[int, list[int]] = {}  # addresses of pinned memory by size
        self.events: list[int] = []  # that are to be used again

    def check(self, code: int, what: str) -> None:
        if code:
            text = (self._error_text(code) or b"unknown").decode(errors="replace")
            raise errors.BackendError(
                f"[GPU {self.device}]",
                f"{what} to succeed",
                f"{self._prefix} error {code}: {text}",
                "See the driver's log (dmesg). KERAS_DIST_GPU=host reduces on the host.",
            )

    def use(self) -> None:
        """Makes the calling thread use the GPU; a thread starts with the first one."""
        if _thread.device != self.device:
            self.check(self._set_device(self.device), "the selection of the GPU")
            _thread.device = self.device

    def count(self) -> int:
        """Returns the number of GPUs that this process sees; 0 without a driver."""
        number = c_int(0)
        return number.value if self._count(ctypes.byref(number)) == 0 else 0

    def bus_id(self, device: int) -> str:
        """Returns the PCI bus id of a GPU, by which NCCL tells GPUs of a node apart."""
        text = ctypes.create_string_buffer(PCI_NBYTES)
        self.check(self._bus_id(text, PCI_NBYTES, device), "the query of a PCI bus id")
        return text.value.decode()

    def new_stream(self) -> int:
        """Returns a new stream that does not wait for the default stream."""
        self.use()
        stream = c_void_p()
        self.check(self._new_stream(ctypes.byref(stream), NON_BLOCKING), "a new stream")
        return stream.value or 0

    @functools.cached_property
    def copies(self) -> int:
        """The stream of copies between the GPU and the host."""
        return self.new_stream()

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copies between any memory, in the order of a stream."""
        self.use()
        self.check(self._copy(target, source, nbytes, BY_ADDRESS, stream), "a copy")

    def pinned(self, nbytes: int) -> np.ndarray:
        """Returns pinned uint8 memory, that of arrays that are gone first: pinning takes long."""
        size = 1 << max(12, (nbytes - 1).bit_length())
        memory = (ctypes.c_uint8 * size).from_address(self._pinned(size))
        array = np.frombuffer(memoryview(memory), np.uint8)
        memory.owner = _Pinned(self._unused, memory)  # type: ignore[attr-defined]
        return array[:nbytes]

    def _pinned(self, size: int) -> int:
        with contextlib.suppress(IndexError):
            return self._unused.setdefault(size, []).pop()
        self.use()
        address = c_void_p()
        self.check(self._pin(ctypes.byref(address), size, 0), "pinned memory")
        return address.value or 0

    def new_event(self) -> int:
        """Returns an event: one that nobody uses any more, since its end would wait for the GPU."""
        with contextlib.suppress(IndexError):
            return self.events.pop()
        event = c_void_p()
        self.check(self._new_event(ctypes.byref(event), DISABLE_TIMING), "a new event")
        return event.value or 0

    def event(self, stream: int) -> "Event":
        """Returns an event that is reached when all earlier work of a stream has been done."""
        return Event(self, stream)


class _Pinned:
    """Keeps pinned memory for further arrays when the last array of it is gone."""

    def __init__(self, unused: dict[int, list[int]], memory: Any):
        self._unused, self._size = unused, ctypes.sizeof(memory)
        self._address = ctypes.addressof(memory)

    def __del__(self) -> None:
        self._unused[self._size].append(self._address)


class Event:
    """A place in the work of a stream; see `Runtime.event`."""

    _handle = 0

    def __init__(self, runtime: Runtime, stream: int):
        runtime.use()
        self._runtime, self._handle = runtime, runtime.new_event()
        runtime.check(runtime._record(self._handle, stream), "the record of an event")

    def is_reached(self) -> bool:
        code = self._runtime._query(self._handle)
        if code == NOT_READY:
            return False
        self._runtime.check(code, "the work of the GPU")
        return True

    def wait(self) -> None:
        """Blocks the host until the work before it has been done."""
        nap = SHORTEST_NAP_SECONDS
        while not self.is_reached():
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_SECONDS)

    def hold(self, stream: int) -> None:
        """Makes later work of a stream wait for it; does not block the host."""
        self._runtime.use()
        self._runtime.check(self._runtime._wait(stream, self._handle, 0), "a wait of a stream")

    def __del__(self) -> None:
        if self._handle:
            self._runtime.events.append(self._handle)


_device = 0


@functools.cache
def _runtime_of(device: int) -> Runtime | None:
    table = find("runtime")
    try:
        return None if table is None else Runtime(table, device)
    except AttributeError as error:
        raise errors.BackendError(
            "[keras_dist]",
            f"a runtime with the function {error}",
            f"{table.path if table else ''} without it",
            f"Install {missing('runtime')}.",
        ) from None


def load_runtime(device: int | None = None) -> Runtime | None:
    """Returns the runtime of the GPU of this process; `None` if there is no library."""
    global _device
    if device is not None:
        _device = device
    return _runtime_of(_device)
