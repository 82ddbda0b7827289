"""The path of GPU arrays, the libraries and what passes to them; without a GPU."""

import ctypes
import sys
import threading
import types
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from keras_dist import _engine, _gpu, errors
from keras_dist._engine.nccl import launches
from keras_dist._engine.nccl import path as paths
from keras_dist._gpu import cuda, nccl_library
from keras_dist.monitor import gpu as monitor

OP = _engine.ReduceOp


def rank_gpu(bus_id="0", node="n1", version=22304, reason=""):
    return _gpu.GpuFacts(bus_id, version, "/lib/libnccl.so.2", reason, node)


# --- The path


def test_every_rank_has_a_gpu_of_its_own():
    gpus = [rank_gpu("0"), rank_gpu("1"), rank_gpu("0", node="n2")]
    for setting in ("auto", "nccl"):
        path = paths.choose_path(setting, gpus, range(3), shares=False)
        assert path.uses_nccl
        assert str(path) == "by NCCL: version 2.23.4, 3 ranks"
    assert not paths.choose_path("host", gpus, range(3), shares=False).uses_nccl
    assert paths.choose_path("auto", [rank_gpu(), rank_gpu()], [0, 1], shares=True).uses_nccl


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([rank_gpu("0"), rank_gpu("0")], "ranks 4 and 7 share GPU 0 of n1"),  # or two MIG instances
        ([rank_gpu("0"), rank_gpu(reason="it has no GPU")], "rank 7: it has no GPU"),
        (
            [rank_gpu("0"), rank_gpu("1", version=22000)],
            "rank 7 has NCCL 2.20.0, rank 4 2.23.4",
        ),
    ],
)
def test_why_the_host_is_used(gpus, reason):
    path = paths.choose_path("auto", gpus, [4, 7], shares=False)
    assert (path.uses_nccl, path.reason) == (False, reason)
    assert str(path) == f"through pinned host memory: {reason}"
    with pytest.raises(errors.LaunchError, match=reason):
        paths.choose_path("nccl", gpus, [4, 7], shares=False)


def test_what_nccl_defines():
    defined = paths.is_defined
    for dtype in ("float32", "float64", "float16", ml_dtypes.bfloat16, "complex64"):
        assert defined(OP.AVERAGE, np.dtype(dtype), 1)
    assert defined(OP.SUM, np.dtype("float32"), 1 / 3)
    assert defined(OP.SUM, np.dtype(ml_dtypes.bfloat16), 0.25)
    assert not defined(OP.SUM, np.dtype(ml_dtypes.bfloat16), 1 / 3)
    assert not defined(OP.MAX, np.dtype("float32"), 0.5)
    assert not defined(OP.MAX, np.dtype("complex64"), 1)
    assert defined(OP.SUM, np.dtype("int64"), 1)
    assert not defined(OP.AVERAGE, np.dtype("int64"), 1)
    assert not defined(OP.ADASUM, np.dtype("float32"), 1)
    for dtype in ("int16", "uint16", ml_dtypes.float8_e4m3fn):
        assert not defined(OP.SUM, np.dtype(dtype), 1)


# --- Launches


@pytest.mark.parametrize(
    ("reached", "fails"),
    [([True], False), ([False], True), (errors.BackendError("the GPU has failed"), True)],
    ids=["ended", "on its way", "failed"],
)
def test_a_launch_that_has_ended_does_not_fail(reached, fails):
    is_reached = mock.Mock(side_effect=reached)
    launch = launches.Launch(types.SimpleNamespace(is_reached=is_reached), [0, 1], "sum", ())
    launch.fail(RuntimeError("a later launch has failed"))
    assert (launch.error is not None) == fails


# --- The libraries


class Recorder:
    """A table of functions that record the arguments of their calls."""

    def __init__(self, code=0, lacks=()):
        self.calls, self._code, self._lacks, self._kept = {}, code, lacks, []
        self.path, self.prefix = "/lib/libnccl.so.2", "nccl"

    def function(self, name, *arguments, result=ctypes.c_int):
        if name in self._lacks:
            raise AttributeError(name)

        def record(*values):
            self.calls[name] = values
            return 0 if result is not ctypes.c_int else self._code

        real = ctypes.c_void_p if result is ctypes.c_char_p else result
        callback = ctypes.CFUNCTYPE(real, *arguments)(record)
        self._kept.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        return ctypes.CFUNCTYPE(result, *arguments)(address)


def array(address, count=3, dtype="float32"):
    return types.SimpleNamespace(address=address, count=count, dtype=np.dtype(dtype))


def test_counts_over_two_billion_and_addresses_of_64_bits_reach_nccl():
    table = Recorder()
    library = nccl_library.Nccl(table)
    count, high = 2**31 + 7, 2**47 - 64
    source = array(high, count, ml_dtypes.bfloat16)
    library.allreduce(source, array(high - 64), 4, high + 8, 2**40)
    assert table.calls["ncclAllReduce"] == (high, high - 64, count, 9, 4, high + 8, 2**40)
    library.allreduce(array(high, count, "complex128"), array(high), 0, 1, 2)
    assert table.calls["ncclAllReduce"] == (high, high, 2 * count, 8, 0, 1, 2)
    library.broadcast(0, high, 2**33 + 1, 3, 1, 2)
    assert table.calls["ncclBroadcast"] == (None, high, 2**33 + 1, 1, 3, 1, 2)
    library.reduce(array(1, count, "float16"), array(2), 0, 5, 6, 7)
    assert table.calls["ncclReduce"] == (1, 2, count, 6, 0, 5, 6, 7)


def test_an_error_of_nccl_says_where_and_what_to_do():
    failing = Recorder(code=2)  # the functions live as long as their table
    library = nccl_library.Nccl(failing)
    with pytest.raises(
        _gpu.NcclError, match=r"Expected an allreduce to succeed. .*error 2"
    ) as told:
        library.allreduce(array(1), array(2), 0, 4, 5)
    assert "NCCL_DEBUG=INFO" in str(told.value)
    under_way = Recorder(code=nccl_library.IN_PROGRESS)
    library = nccl_library.Nccl(under_way)
    library.allreduce(array(1), array(2), 0, 4, 5)


def test_nccl_that_lacks_a_function_is_not_used(monkeypatch):
    monkeypatch.setattr(
        nccl_library, "find", lambda kind: Recorder(lacks=["ncclCommInitRankConfig"])
    )
    nccl_library.load_nccl.cache_clear()
    assert nccl_library.load_nccl() == "/lib/libnccl.so.2 lacks ncclCommInitRankConfig"
    nccl_library.load_nccl.cache_clear()


def test_an_error_of_the_runtime_names_the_gpu(monkeypatch):
    table = Recorder(code=700)
    table.prefix = "cuda"
    gpu = cuda.Runtime(table, 3)
    monkeypatch.setattr(gpu, "use", lambda: None)
    with pytest.raises(errors.BackendError, match=r"\[GPU 3\] Expected a copy to .*cuda error 700"):
        gpu.copy(1, 2, 3, 4)
    assert table.calls["cudaMemcpyAsync"] == (1, 2, 3, 4, 4)


def test_hip_has_other_names():
    table = Recorder()
    table.prefix = "hip"
    cuda.Runtime(table).copy(1, 2, 2**33, 5)
    assert table.calls["hipMemcpyAsync"] == (1, 2, 2**33, 4, 5)
    assert set(table.calls) <= {"hipMemcpyAsync", "hipSetDevice"}


def test_a_thread_selects_the_gpu_before_its_first_call():
    table = Recorder()
    table.prefix = "cuda"
    gpu = cuda.Runtime(table, 3)
    works = [lambda: gpu.copy(1, 2, 3, 4), lambda: gpu.event(5), gpu.new_stream]
    for work in works:
        table.calls.clear()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert table.calls["cudaSetDevice"] == (3,)
        assert next(iter(table.calls)) == "cudaSetDevice"


@pytest.mark.parametrize(
    ("kind", "there", "prefix"),
    [
        ("nccl", "librccl.so.1", "nccl"),
        ("nccl", "librccl.so", "nccl"),
        ("runtime", "libamdhip64.so.6", "hip"),
    ],
)
def test_libraries_of_rocm_are_loaded_where_nvidia_has_none(monkeypatch, kind, there, prefix):
    opened = []

    def open_library(path, mode=0):
        opened.append(path)
        if path != there:
            raise OSError(path)
        return ctypes.pythonapi

    monkeypatch.setattr(cuda.ctypes, "CDLL", open_library)
    monkeypatch.delenv(cuda.DOUBLE, raising=False)
    table = cuda.find.__wrapped__(kind)
    assert (table.path, table.prefix) == (there, prefix)
    assert opened[0] in ("libnccl.so.2", "libcudart.so.13")
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda *args, **kwargs: open_library("none"))
    assert cuda.find.__wrapped__(kind) is None


def test_a_rank_whose_runtime_fails_tells_the_others(monkeypatch):
    failing = Recorder(code=100)
    failing.prefix = "cuda"
    gpu = cuda.Runtime(failing, 0)
    monkeypatch.setattr(gpu, "count", lambda: 1)
    monkeypatch.setattr(nccl_library, "load_runtime", lambda device=None: gpu)
    found = nccl_library.facts_of(0)
    assert "the query of a PCI bus id" in found.reason
    assert (found.bus_id, found.version) == ("", 0)


def test_a_wheel_is_found_before_the_system(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = [path for path, _ in cuda._candidates(("libnccl.so.2",), ("nccl/lib",))]
    assert found == ["libnccl.so.2", str(folder / "libnccl.so.2"), "libnccl.so.2"]


# --- Which GPU a rank has


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("", []),
        ("GPU-bbb", [1]),
        ("GPU-ccc,GPU-aaa", [2, 0]),
        ("MIG-1a2b,MIG-3c4d", ["MIG-1a2b"]),
    ],
)
def test_visible_gpus(text, expected):
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert monitor.visible(3, ["GPU-aaa", "GPU-bbb", "GPU-ccc"], environment) == expected


class Nvml:
    """NVIDIA's management library on a node of two GPUs, one of them with a MIG instance."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, number):
        return f"handle {number}"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle[-1]}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid.decode()

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        return {b"0000:0a:00.0": "handle 0", b"0000:0b:00.0": "handle 1"}[bus_id]

    def nvmlDeviceGetIndex(self, handle):
        return int(handle[-1])

    def nvmlDeviceGetName(self, handle):
        return f"name of {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=3, total=10)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle.startswith("MIG-"):
            raise self.NVMLError
        return types.SimpleNamespace(gpu=40)


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setattr(monitor, "_library", Nvml)
    monkeypatch.setattr(monitor, "_handles", monitor._handles.__wrapped__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("nvml")
def test_ranks_of_a_node_have_its_gpus_in_turn():
    assert [monitor.gpu_of(rank).place for rank in range(3)] == ["0", "1", "0"]
    assert monitor.gpu_of(0) == monitor.Gpu("name of handle 0", 0.4, 3, 10, "0")
    assert monitor.gpu_of(0, "0000:0b:00.0").place == "1"  # the one that it has selected


@pytest.mark.usefixtures("nvml")
def test_a_mig_instance_has_memory_and_no_utilization(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a2b3c4d5e6f")
    gpu = monitor.gpu_of(5, "0000:0b:00.0")
    assert (gpu.place, gpu.use, gpu.memory_nbytes) == ("MIG-1a2b3c4d", None, 3)
