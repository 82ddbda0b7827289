"""A test double of CUDA's runtime and NCCL: C functions over MPI and memory of the host.

`_KERAS_DIST_GPU_DOUBLE` names this file. The functions have the C types of the libraries, so
addresses, codes of dtypes, counts, handles of streams and error codes pass through ctypes as they
would to the libraries. A stream is a thread, so work that nobody waits for arrives late. Stream 0
is the program itself: arrays of a CPU are written in the order of the program.

`GPU_DOUBLE` holds words: `shared` gives all ranks the same GPU, `slow` delays every operation.
`die-in-N` kills rank 1 before its N-th launch, and `stuck-in-N` lets that launch never end.
`fail-in-N` makes that launch an error, and `fail-in-init` the connection of rank 1. A launch of
other ranks that needs a rank which has failed never ends.
"""

import atexit
import ctypes
import functools
import itertools
import os
import queue
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from ctypes import POINTER, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import ml_dtypes
import numpy as np

VERSION = 22304
SUCCESS, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 0, 3, 4, 5, 7
NOT_READY, INVALID_VALUE = 600, 1
FIRST_TAG, TAGS = 1000, 60
RANK_AT_FAULT = 1

DTYPES = {
    0: "int8",
    1: "uint8",
    2: "int32",
    3: "uint32",
    4: "int64",
    5: "uint64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: ml_dtypes.bfloat16,
}
UFUNCS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum, 4: np.add}
AVERAGE, FIRST_FACTOR = 4, 5

words = os.environ.get("GPU_DOUBLE", "").split()
launches = []  # for each launch of this process: the names of its operations

_handles = itertools.count(1)
_numbers = itertools.count()  # of communicators
_objects = {}  # streams, events, communicators by handle
_pinned = {}
_has_aborted = []
_unfinished = []  # messages after an abort: MPI may still write to their memory
_texts = {}
_group = threading.local()


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
    ]


def world_rank():
    found = [os.environ.get(name) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")]
    return int(next(filter(None, found), "0"))


def keep(thing):
    """Returns the handle of an object."""
    handle = next(_handles)
    _objects[handle] = thing
    return handle


def exported(*arguments, result=c_int):
    """Makes a function a C function; an exception is an internal error."""

    def wrap(function):
        @functools.wraps(function)
        def run(*args):
            try:
                return function(*args) or 0
            except Exception:
                import traceback

                traceback.print_exc()
                return INTERNAL_ERROR

        return function.__name__, ctypes.CFUNCTYPE(result, *arguments)(run)

    return wrap


# --- Streams


class Stream(threading.Thread):
    """A thread that does the work of a stream in order."""

    def __init__(self):
        super().__init__(daemon=True, name="keras_dist gpu double")
        self.work = queue.SimpleQueue()
        self.start()

    def run(self):
        while (function := self.work.get()) is not None:
            if "slow" in words:
                time.sleep(0.002)
            function()


def enqueue(stream, function):
    if stream:
        _objects[stream].work.put(function)
    else:
        function()


def runtime(name):
    """Returns the address of a function of CUDA's runtime."""
    return address(RUNTIME, name)


def nccl(name):
    """Returns the address of a function of NCCL."""
    return address(NCCL, name)


def address(functions, name):
    found = dict(functions)
    if name not in found:
        raise AttributeError(name)
    return ctypes.cast(found[name], c_void_p).value


def text_of(code):
    text = _texts.setdefault(code, ctypes.create_string_buffer(f"double {code}".encode()))
    return ctypes.addressof(text)


@exported(c_int, result=c_void_p)
def cudaGetErrorString(code):
    return text_of(code)


@exported(POINTER(c_int))
def cudaGetDeviceCount(count):
    count[0] = 1


@exported(c_int)
def cudaSetDevice(device):
    return SUCCESS if device == 0 else INVALID_VALUE


@exported(c_void_p, c_int, c_int)
def cudaDeviceGetPCIBusId(text, length, device):
    number = 0 if "shared" in words else world_rank()
    bus_id = f"0000:{number:02x}:00.0".encode() + b"\0"
    if device or length < len(bus_id):
        return INVALID_VALUE
    ctypes.memmove(text, bus_id, len(bus_id))
    return SUCCESS


@exported(POINTER(c_void_p), c_uint)
def cudaStreamCreateWithFlags(stream, flags):
    stream[0] = keep(Stream())


@exported(c_void_p)
def cudaStreamDestroy(stream):
    _objects.pop(stream).work.put(None)


@exported(POINTER(c_void_p), c_uint)
def cudaEventCreateWithFlags(event, flags):
    event[0] = keep(threading.Event())


@exported(c_void_p, c_void_p)
def cudaEventRecord(event, stream):
    # Streams that wait for the place before keep waiting for that one.
    reached = _objects[event] = threading.Event()
    enqueue(stream, reached.set)


@exported(c_void_p)
def cudaEventQuery(event):
    return SUCCESS if _objects[event].is_set() else NOT_READY


@exported(c_void_p, c_void_p, c_uint)
def cudaStreamWaitEvent(stream, event, flags):
    enqueue(stream, _objects[event].wait)


@exported(c_void_p, c_void_p, c_size_t, c_int, c_void_p)
def cudaMemcpyAsync(target, source, nbytes, kind, stream):
    if nbytes and not (target and source):
        return INVALID_VALUE
    enqueue(stream, functools.partial(ctypes.memmove, target or 0, source or 0, nbytes))
    return SUCCESS


@exported(POINTER(c_void_p), c_size_t, c_uint)
def cudaHostAlloc(memory, nbytes, flags):
    buffer = ctypes.create_string_buffer(nbytes)
    memory[0] = ctypes.addressof(buffer)
    _pinned[ctypes.addressof(buffer)] = buffer


RUNTIME = [pair for name, pair in list(globals().items()) if name.startswith("cuda")]


# --- NCCL


class Ranks:
    """A communicator: ranks of the job that send each other messages."""

    def __init__(self, size, name, rank):
        self.size, self.rank = size, rank
        self.state, self.aborted = IN_PROGRESS, False
        number, folder = struct.unpack("<i124s", name)
        self.folder = Path(folder.rstrip(b"\0").decode())
        self.tag = FIRST_TAG + number * TAGS
        self.turn = 0
        self.ranks = []
        self.factors = {}
        threading.Thread(target=self.connect, daemon=True).start()

    def connect(self):
        part = self.folder / f"new-{self.rank}"
        part.write_text(str(world_rank()))
        part.rename(self.folder / str(self.rank))
        files = [self.folder / str(rank) for rank in range(self.size)]
        while not all(file.exists() for file in files):
            if self.aborted:
                return
            time.sleep(0.001)
        self.ranks = [int(file.read_text()) for file in files]
        self.state = SUCCESS

    def exchange(self, mine, nbytes):
        """Returns the bytes of all ranks, as many of each; `None` after an abort."""
        from mpi4py import MPI

        self.turn += 1
        tag = self.tag + self.turn % TAGS
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts = [bytearray(nbytes) for _ in range(self.size)]
        parts[self.rank] = mine
        world = MPI.COMM_WORLD
        requests = [world.Irecv(parts[rank], self.ranks[rank], tag) for rank in others]
        requests += [world.Isend(mine, self.ranks[rank], tag) for rank in others]
        try:
            while not MPI.Request.Testall(requests):
                if self.aborted:
                    for request in requests[: len(others)]:
                        request.Cancel()
                    _unfinished.append((requests, parts, mine))
                    return None
                time.sleep(0.0002)
        except MPI.Exception:
            _unfinished.append((requests, parts, mine))
            self.wait_for_abort()
            return None
        return parts

    def wait_for_abort(self):
        """Waits as a kernel that waits for a rank that has died."""
        while not self.aborted:
            time.sleep(0.001)

    def run(self, name, source, target, count, code, op, root):
        """Runs an operation; a difference between ranks is an error, where NCCL would hang."""
        if self.aborted:
            return  # its arrays may be gone
        dtype = np.dtype(DTYPES[code])
        what = f"{name} {count} {code} {op} {root}".encode().ljust(64)
        nbytes = count * dtype.itemsize
        sent = bytearray(what + ctypes.string_at(source, nbytes))
        parts = self.exchange(sent, len(sent))
        if parts is None:
            return
        if any(bytes(part[:64]) != what for part in parts):
            self.state = INVALID_USAGE
            return
        arrays = [np.frombuffer(part[64:], dtype) for part in parts]
        if name == "ncclBroadcast":
            result = arrays[root]
        elif name == "ncclAllReduce" or root == self.rank:
            result = self.reduce(arrays, op)
        else:
            return
        ctypes.memmove(target, np.ascontiguousarray(result).ctypes.data, nbytes)

    def reduce(self, arrays, op):
        dtype = arrays[0].dtype
        wide = np.float32 if dtype.itemsize < 4 and dtype.kind not in "iu" else dtype
        factor = self.factors.get(op)
        with np.errstate(all="ignore"):
            total = None
            for array in arrays:
                part = array.astype(wide)
                part = part if factor is None else part * np.asarray(factor, wide)
                total = part if total is None else UFUNCS.get(op, np.add)(total, part)
            if op == AVERAGE:
                total = total / np.asarray(self.size, wide)
            return total.astype(dtype)


def comm_of(handle):
    return _objects.get(handle) if handle else None


@exported(POINTER(c_int))
def ncclGetVersion(version):
    version[0] = VERSION


@exported(c_int, result=c_void_p)
def ncclGetErrorString(code):
    return text_of(code)


@exported(c_void_p, result=c_void_p)
def ncclGetLastError(comm):
    return text_of(0)


@exported(POINTER(UniqueId))
def ncclGetUniqueId(made):
    folder = tempfile.mkdtemp(prefix="gpu_double-")
    # Messages of a communicator that was aborted are still there: no other gets its tags.
    number = world_rank() * 1000 + next(_numbers)
    name = struct.pack("<i124s", number, folder.encode())
    ctypes.memmove(made, name, len(name))


@exported(POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config))
def ncclCommInitRankConfig(comm, size, name, rank, config):
    given = config[0]
    right = given.size == ctypes.sizeof(Config) and given.magic == 0xCAFEBEEF
    if not right or given.version != 21400 or given.blocking or not 0 <= rank < size:
        return INVALID_ARGUMENT
    if world_rank() == RANK_AT_FAULT and "fail-in-init" in words:
        words.remove("fail-in-init")
        record_fault()
        return INTERNAL_ERROR
    comm[0] = keep(Ranks(size, bytes(name), rank))
    return IN_PROGRESS


@exported(c_void_p)
def ncclCommDestroy(comm):
    ranks = _objects.pop(comm)
    shutil.rmtree(ranks.folder, ignore_errors=True)


@exported(c_void_p)
def ncclCommAbort(comm):
    ranks = _objects.pop(comm)
    ranks.aborted = True
    shutil.rmtree(ranks.folder, ignore_errors=True)
    if not _has_aborted:
        atexit.register(receive_the_rest)
        _has_aborted.append(True)


def receive_the_rest():
    """Receives what others have sent in operations that were aborted: MPI's end waits for it."""
    from mpi4py import MPI

    try:
        status = MPI.Status()
        while (message := MPI.COMM_WORLD.Improbe(status=status)) is not None:
            message.Recv(bytearray(status.Get_count(MPI.BYTE)))
    except MPI.Exception:
        pass  # a rank has died


@exported(c_void_p, POINTER(c_int))
def ncclCommGetAsyncError(comm, state):
    ranks = comm_of(comm)
    if ranks is None:
        return INVALID_ARGUMENT
    state[0] = ranks.state
    return SUCCESS


@exported()
def ncclGroupStart():
    _group.calls = []


@exported()
def ncclGroupEnd():
    calls, _group.calls = _group.calls, None
    return launch(calls)


@exported(POINTER(c_int), c_void_p, c_int, c_int, c_void_p)
def ncclRedOpCreatePreMulSum(op, scalar, code, residence, comm):
    ranks = comm_of(comm)
    if ranks is None or code not in DTYPES or residence != 1:
        return INVALID_ARGUMENT
    dtype = np.dtype(DTYPES[code])
    factor = np.frombuffer(ctypes.string_at(scalar, dtype.itemsize), dtype)[0]
    op[0] = FIRST_FACTOR + len(ranks.factors)
    ranks.factors[op[0]] = factor
    return SUCCESS


@exported(c_int, c_void_p)
def ncclRedOpDestroy(op, comm):
    del comm_of(comm).factors[op]


@exported(c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
def ncclAllReduce(source, target, count, code, op, comm, stream):
    return add("ncclAllReduce", source, target, count, code, op, 0, comm, stream)


@exported(c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
def ncclBroadcast(source, target, count, code, root, comm, stream):
    return add("ncclBroadcast", source, target, count, code, 0, root, comm, stream)


@exported(c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p)
def ncclReduce(source, target, count, code, op, root, comm, stream):
    return add("ncclReduce", source, target, count, code, op, root, comm, stream)


def add(name, source, target, count, code, op, root, comm, stream):
    """Adds a call to the group, or launches it."""
    ranks = comm_of(comm)
    if ranks is None or code not in DTYPES or not stream:
        return INVALID_ARGUMENT
    if op >= FIRST_FACTOR and op not in ranks.factors:
        return INVALID_ARGUMENT
    nothing = name == "ncclReduce" and root != ranks.rank
    if count and not (target or nothing):
        return INVALID_ARGUMENT
    call = (name, ranks, (source or 0, target or 0, count, code, op, root), stream)
    if getattr(_group, "calls", None) is None:
        return launch([call])
    _group.calls.append(call)
    return SUCCESS


def record_fault():
    """Records the time of the fault, for the fixture `job` of the fault tests."""
    getattr(sys.modules.get("faults"), "fault", lambda: None)()


def launch(calls):
    launches.append([name for name, *_ in calls])
    if world_rank() == RANK_AT_FAULT and f"fail-in-{len(launches)}" in words:
        record_fault()
        return INTERNAL_ERROR
    if world_rank() == RANK_AT_FAULT and f"die-in-{len(launches)}" in words:
        record_fault()
        os.kill(os.getpid(), signal.SIGKILL)
    if world_rank() == RANK_AT_FAULT and f"stuck-in-{len(launches)}" in words:
        record_fault()
        _, ranks, _, stream = calls[0]
        enqueue(stream, ranks.wait_for_abort)
    for name, ranks, arguments, stream in calls:
        enqueue(stream, functools.partial(ranks.run, name, *arguments))
    return SUCCESS


NCCL = [
    pair for name, pair in list(globals().items()) if name.startswith("nccl") and name != "nccl"
]
