"""NCCL's functions: declarations, codes and errors. RCCL has the same."""

import ctypes
import dataclasses
import functools
import os
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p

import numpy as np

from keras_dist import errors
from keras_dist._gpu.cuda import Table, find, load_runtime
from keras_dist._gpu.device_arrays import DeviceArray

OLDEST = 21400  # the first version whose calls can be made without blocking
IN_PROGRESS = 7
UNIQUE_ID_NBYTES = 128
MAGIC = 0xCAFEBEEF
ON_HOST = 1  # where the factor of a sum lies

# NCCL's codes of dtypes, by name, and the numbers in an element: a complex one is two floats.
DATA_TYPES = {
    "int8": (0, 1),
    "uint8": (1, 1),
    "bool": (1, 1),
    "int32": (2, 1),
    "uint32": (3, 1),
    "int64": (4, 1),
    "uint64": (5, 1),
    "float16": (6, 1),
    "float32": (7, 1),
    "float64": (8, 1),
    "bfloat16": (9, 1),
    "complex64": (7, 2),
    "complex128": (8, 2),
}
# Codes of reductions.
REDUCTIONS = {"sum": 0, "product": 1, "max": 2, "min": 3, "average": 4}
_selected = ""  # PCI bus id


class UniqueId(ctypes.Structure):
    """The name by which the ranks of a communicator find each other."""

    _fields_ = [("internal", c_char * UNIQUE_ID_NBYTES)]


class _Config(ctypes.Structure):
    """The options of a communicator, as of NCCL 2.14; later versions read its size."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]


class NcclError(errors.BackendError):
    """NCCL reports an error."""


def version_text(code: int) -> str:
    """Returns the text of a version of NCCL: 2.23.4 for 22304."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


class Nccl:
    """NCCL's functions, which raise `NcclError`. Communicators do not block, see `settled`."""

    def __init__(self, table: Table):
        self.path = table.path
        ptr, handle, function = c_void_p, POINTER(c_void_p), table.function
        self._version = function("ncclGetVersion", POINTER(c_int))
        self._error_text = function("ncclGetErrorString", c_int, result=c_char_p)
        self._last_error = function("ncclGetLastError", ptr, result=c_char_p)
        self._unique_id = function("ncclGetUniqueId", POINTER(UniqueId))
        self._init = function(
            "ncclCommInitRankConfig", handle, c_int, UniqueId, c_int, POINTER(_Config)
        )
        self._destroy = function("ncclCommDestroy", ptr)
        self._abort = function("ncclCommAbort", ptr)
        self._async_error = function("ncclCommGetAsyncError", ptr, POINTER(c_int))
        self._start = function("ncclGroupStart")
        self._end = function("ncclGroupEnd")
        self._new_factor = function(
            "ncclRedOpCreatePreMulSum", POINTER(c_int), ptr, c_int, c_int, ptr
        )
        self._free_factor = function("ncclRedOpDestroy", c_int, ptr)
        on_arrays = (ptr, ptr, c_size_t, c_int)
        self._allreduce = function("ncclAllReduce", *on_arrays, c_int, ptr, ptr)
        self._broadcast = function("ncclBroadcast", *on_arrays, c_int, ptr, ptr)
        self._reduce = function("ncclReduce", *on_arrays, c_int, c_int, ptr, ptr)

    def version(self) -> int:
        """Returns the version: 22304 is 2.23.4."""
        number = c_int(0)
        self._check(self._version(ctypes.byref(number)), "the query of its version")
        return number.value

    def unique_id(self) -> bytes:
        """Returns a new name of a communicator, made by one rank for all."""
        made = UniqueId()
        self._check(self._unique_id(ctypes.byref(made)), "a unique id")
        return bytes(made)

    def init(self, size: int, unique_id: bytes, rank: int) -> int:
        """Starts to make a communicator. Collective; `settled` tells when it has been made."""
        config = _Config(ctypes.sizeof(_Config), MAGIC, OLDEST, 0)
        made, name = c_void_p(), UniqueId.from_buffer_copy(unique_id)
        code = self._init(ctypes.byref(made), size, name, rank, ctypes.byref(config))
        self._check(code, f"a communicator of {size} ranks")
        return made.value or 0

    def settled(self, comm: int) -> bool:
        """Returns whether the last call of a communicator has been done."""
        state = c_int(0)
        self._check(self._async_error(comm, ctypes.byref(state)), "the query of its state", comm)
        self._check(state.value, "its last operation", comm)
        return state.value != IN_PROGRESS

    def destroy(self, comm: int) -> None:
        """Frees a communicator whose operations have ended. Collective."""
        self._check(self._destroy(comm), "the end of a communicator")

    def abort(self, comm: int) -> None:
        """Ends a communicator and its operations, without the other ranks."""
        self._abort(comm)

    def start(self) -> None:
        self._check(self._start(), "the start of a group")

    def end(self) -> None:
        self._check(self._end(), "the launch of a group")

    def new_factor(self, factor: float, dtype: np.dtype, comm: int) -> int:
        """Returns a sum of contributions that are multiplied by a factor first."""
        code, _ = DATA_TYPES[dtype.name]
        scalar, op = np.array(factor, dtype), c_int(0)
        made = self._new_factor(ctypes.byref(op), scalar.ctypes.data, code, ON_HOST, comm)
        self._check(made, "a sum with a factor", comm)
        return op.value

    def free_factor(self, op: int, comm: int) -> None:
        self._check(self._free_factor(op, comm), "the end of a sum with a factor", comm)

    def allreduce(
        self, source: DeviceArray, target: DeviceArray, op: int, comm: int, stream: int
    ) -> None:
        """Reduces the arrays of all ranks into one of each."""
        code, each = DATA_TYPES[source.dtype.name]
        places = source.address, target.address, source.count * each
        self._check(self._allreduce(*places, code, op, comm, stream), "an allreduce", comm)

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: int, stream: int
    ) -> None:
        """Copies bytes at an address of the root into an address of each rank."""
        code, _ = DATA_TYPES["uint8"]
        done = self._broadcast(source, target, nbytes, code, root, comm, stream)
        self._check(done, "a broadcast", comm)

    def reduce(
        self, source: DeviceArray, target: DeviceArray, op: int, root: int, comm: int, stream: int
    ) -> None:
        """Reduces the arrays of all ranks into one of the root."""
        code, each = DATA_TYPES[source.dtype.name]
        places = source.address, target.address, source.count * each
        self._check(self._reduce(*places, code, op, root, comm, stream), "a reduction", comm)

    def _check(self, code: int, what: str, comm: int = 0) -> None:
        if code in (0, IN_PROGRESS):
            return
        texts = [self._error_text(code), self._last_error(comm)]
        told = "; ".join(text.decode(errors="replace") for text in texts if text)
        raise NcclError(
            "[NCCL]",
            f"{what} to succeed",
            f"error {code}: {told}",
            "Set NCCL_DEBUG=INFO for NCCL's log. KERAS_DIST_GPU=host reduces on the host.",
        )


@functools.cache
def load_nccl() -> Nccl | str:
    """Returns NCCL, or the reason why it cannot be used."""
    table = find("nccl")
    if table is None:
        return "there is neither NCCL nor RCCL"
    try:
        nccl = Nccl(table)
    except AttributeError as error:
        return f"{table.path} lacks {error}"
    if nccl.version() < OLDEST:
        return f"{table.path} is older than NCCL 2.14"
    return nccl


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """The GPU of a rank."""

    bus_id: str = ""
    version: int = 0
    path: str = ""
    reason: str = "it has no GPU"
    node: str = dataclasses.field(default_factory=lambda: os.uname().nodename)


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
