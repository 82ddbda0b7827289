"""Ten thousand operations of every kind, blocking and queued: correct results and no leaks."""

import ctypes
import gc
import os
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from test_shared_memory import entries

import keras_dist
from keras_dist import runtime

pytestmark = pytest.mark.jobs("engine", "torch-3")

OPERATIONS = 10_000
WARM = 3_000  # every pool has its final size by then
OWN_NBYTES = 16 * 2**20  # normal variation; a leak of 3 KiB per operation would exceed it
SHARED_NBYTES = 2**20

DTYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int8, np.uint16, np.int64]
REDUCTIONS = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}
# From a few elements to an array that is reduced in slices in shared memory.
LENGTHS = [0, 5, 700, 20_000]


# --- Inputs and outputs of an operation, computed by every rank for all ranks


class Draw:
    """The random numbers of an operation: equal on all ranks, except for the inputs."""

    def __init__(self, turn):
        self.rng = np.random.default_rng(turn)
        self.turn = turn
        self.rank, self.size = keras_dist.rank(), keras_dist.size()

    def spec(self):
        return int(self.rng.choice(LENGTHS)), DTYPES[self.rng.integers(len(DTYPES))]

    def arrays(self, length, dtype):
        """The input of each rank: integers so small that every dtype represents every result."""
        lengths = length if isinstance(length, list) else [length] * self.size
        return [
            ((np.arange(n) * 7 + self.turn + rank) % 3).astype(dtype)
            for rank, n in enumerate(lengths)
        ]

    def own_lengths(self, length):
        return [int(n) for n in self.rng.integers(0, length + 1, self.size)]

    def reduced(self, arrays, op):
        dtype = arrays[0].dtype
        wide = np.stack(arrays).astype(np.float64)
        if op != "average":
            return REDUCTIONS[op](wide, axis=0).astype(dtype)
        if dtype.kind in "iu":
            return (wide.sum(axis=0) // self.size).astype(dtype)
        kind = np.float64 if dtype == np.float64 else np.float32
        return (wide.sum(axis=0).astype(kind) / kind(self.size)).astype(dtype)

    def op(self, *ops):
        return str(self.rng.choice(ops or ["average", *REDUCTIONS]))


def allreduce(draw):
    arrays, op = draw.arrays(*draw.spec()), draw.op()
    return (arrays[draw.rank], op), draw.reduced(arrays, op)


def grouped_allreduce(draw):
    length, dtype = draw.spec()
    lists = [draw.arrays(length, each) for each in (dtype, np.int64, dtype)]
    op = draw.op("average", "sum")
    mine = [arrays[draw.rank] for arrays in lists]
    return (mine, op), [draw.reduced(arrays, op) for arrays in lists]


def reducescatter(draw):
    (values, op), expected = grouped_reducescatter(draw)
    return (values[0], op), expected[0]


def grouped_reducescatter(draw):
    lists, op = [draw.arrays(*draw.spec()) for _ in range(2)], draw.op("average", "sum")
    mine = [arrays[draw.rank] for arrays in lists]
    whole = [draw.reduced(arrays, op) for arrays in lists]
    return (mine, op), [np.array_split(array, draw.size)[draw.rank] for array in whole]


def allgather(draw):
    length, dtype = draw.spec()
    arrays = draw.arrays(draw.own_lengths(length), dtype)
    return (arrays[draw.rank],), np.concatenate(arrays)


def grouped_allgather(draw):
    both = [allgather(draw) for _ in range(2)]
    return ([value for (value,), _ in both],), [joined for _, joined in both]


def broadcast(draw):
    arrays, root = draw.arrays(*draw.spec()), int(draw.rng.integers(draw.size))
    return (arrays[draw.rank], root), arrays[root]


def alltoall(draw):
    length, dtype = draw.spec()
    table = draw.rng.integers(0, length // draw.size + 1, (draw.size, draw.size))
    arrays = draw.arrays(table.sum(axis=1).tolist(), dtype)
    starts = np.cumsum(table, axis=1) - table
    parts = [
        array[start : start + count]
        for array, start, count in zip(
            arrays, starts[:, draw.rank], table[:, draw.rank], strict=True
        )
    ]
    received = table[:, draw.rank].astype(np.int64)
    return (arrays[draw.rank], table[draw.rank]), (np.concatenate(parts), received)


def sparse_allreduce(draw):
    length, dtype = draw.spec()
    lengths = draw.own_lengths(min(length, 700))
    arrays = draw.arrays(lengths, dtype)
    # An index occurs at most twice on a rank, so sums stay small.
    indices = [np.arange(n) // 2 + rank for rank, n in enumerate(lengths)]
    places = np.unique(np.concatenate(indices))
    table = np.zeros(800, np.float64)
    for array, index in zip(arrays, indices, strict=True):
        np.add.at(table, index, array.astype(np.float64))
    expected = (table[places].astype(dtype), places)
    return (arrays[draw.rank], indices[draw.rank], "sum"), expected


def barrier(draw):
    return (), None


def broadcast_object(draw):
    root = int(draw.rng.integers(draw.size))
    return ((draw.turn, draw.rank), root), (draw.turn, root)


def allgather_object(draw):
    return ("x" * draw.rank,), ["x" * rank for rank in range(draw.size)]


QUEUED = [
    allreduce,
    grouped_allreduce,
    reducescatter,
    grouped_reducescatter,
    allgather,
    grouped_allgather,
    broadcast,
    alltoall,
    sparse_allreduce,
]
KINDS = [*QUEUED, barrier, broadcast_object, allgather_object]


def assert_equal(result, expected):
    assert type(result) is type(expected)
    if isinstance(expected, list | tuple):
        for mine, theirs in zip(result, expected, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(expected, np.ndarray):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        assert result.tobytes() == expected.tobytes()
    else:
        assert result == expected


# --- Resources that must not grow


def state():
    """Returns file descriptors, threads, and the bytes of own and of shared memory."""
    keras_dist.barrier()  # dropped queued operations have run
    runtime.communicator()._forget_calls()  # the size of the kept results depends on which are kept
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    anon, shared = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), anon, shared


@pytest.mark.slow
@pytest.mark.limit(300)
def test_ten_thousand_operations_are_right_and_leave_nothing_behind():
    if keras_dist.size() != 3 or MPI.get_vendor()[0] != "MPICH":
        pytest.skip("takes a minute: run on 3 ranks, under the library with the shorter waits")
    late = np.random.default_rng(keras_dist.rank())  # ranks drop results at different times
    waiting, before = [], None

    def catch_up():
        late.shuffle(waiting)
        while waiting:
            handle, expected = waiting.pop()
            assert_equal(keras_dist.synchronize(handle), expected)

    for turn in range(OPERATIONS):
        if turn == WARM:
            catch_up()
            before = state()
        draw = Draw(turn)
        kind = KINDS[draw.rng.integers(len(KINDS))]
        arguments, expected = kind(draw)
        if late.random() < 0.02:
            time.sleep(late.uniform(0, 0.003))
        if kind in QUEUED and draw.rng.random() < 0.5:
            handle = getattr(keras_dist, f"{kind.__name__}_async")(*arguments)
            if late.random() < 0.9:  # the others are dropped, but still run
                waiting.append((handle, expected))
            del handle
        else:
            assert_equal(getattr(keras_dist, kind.__name__)(*arguments), expected)
        if len(waiting) > late.integers(1, 30):
            catch_up()
    catch_up()
    handles, threads, anon, shared = state()
    assert (handles, threads) == before[:2]
    assert anon < before[2] + OWN_NBYTES
    assert shared < before[3] + SHARED_NBYTES
    assert [name for name in entries() if f"-{os.getpid()}-" in name] == []
