"""Reductions in shared memory: results that are lent, memory that is missing, and no file left."""

import contextlib
import errno
import gc
import itertools
import os
import re
import resource
import stat
import weakref
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI
from test_collectives import raised

import keras_dist
from keras_dist import _engine, errors
from keras_dist._engine import memory
from keras_dist._engine.shm import segments

pytestmark = pytest.mark.jobs("tensorflow-2")

LARGE = 2**20
SUM = _engine.OpOptions(_engine.ReduceOp.SUM)


@pytest.fixture(autouse=True)
def several():
    if keras_dist.size() == 1:
        pytest.skip("one rank shares memory with nobody")


@pytest.fixture(scope="module")
def comm():
    made = _engine.Communicator(MPI, None)
    yield made
    made.free()


def total():
    """Returns the sum of the ranks, which contribute their numbers."""
    return sum(range(keras_dist.size()))


def reduced(comm, arrays, lend=False):
    specs = [(array.shape, array.dtype) for array in arrays]
    names = [str(number) for number in range(len(arrays))]
    plan = _engine.BucketOptions(2**23, lend=lend)
    return _engine.FusedAllreduce(comm, names, specs, SUM, plan)


def test_lent_results_are_in_shared_memory_which_is_reused(comm):
    mine = np.full(LARGE, keras_dist.rank(), np.float32)
    fused = reduced(comm, [mine], lend=True)
    last, places = None, []
    for number in range(7):
        result = fused([mine + number])[0]
        if last is not None:  # valid until the second call after its own
            assert (last == total() + (number - 1) * keras_dist.size()).all()
        assert (result == total() + number * keras_dist.size()).all()
        places.append(result.ctypes.data)
        last = result
    assert len(set(places)) == 3 and places[3:] == places[:-3]
    assert all(place % 64 == 0 for place in places)
    keras_dist.barrier()


def test_a_write_to_a_lent_result_is_private(comm):
    size = keras_dist.size()
    arrays = [np.full(count, keras_dist.rank(), np.float32) for count in (2**20, 2**18 + 1)]
    fused = reduced(comm, arrays, lend=True)
    places = []
    for number in range(9):
        results = fused([array + number for array in arrays])
        places.append(results[0].ctypes.data)
        keras_dist.barrier()
        if number == 2 and keras_dist.rank() == 0:
            results[1][-1] = -1
        keras_dist.barrier()
        for result in results:
            expected = np.full(result.size, total() + number * size, np.float32)
            if number == 2 and keras_dist.rank() == 0 and result is results[1]:
                expected[-1] = -1
            np.testing.assert_array_equal(result, expected)
        del results, result
    # A rank that wrote gets copies from the next use of the memory on; other ranks do not.
    lent = set(places[:2])
    assert len(lent) == 2 and places[2:4] == places[:2]
    copied = [place not in lent for place in places[4:]]
    assert copied == [keras_dist.rank() == 0] * 5


def test_nothing_is_lent_where_writes_cannot_be_detected(monkeypatch):
    comm = _engine.Communicator(MPI, None)
    mine = np.full(2**20, keras_dist.rank(), np.float32)
    with monkeypatch.context() as patched:
        if keras_dist.rank() == 0:
            patched.setattr(segments, "_is_supported", lambda: False)
        fused = reduced(comm, [mine], lend=True)
        results = [fused([mine])[0] for _ in range(2)]
    if keras_dist.rank() == 0:
        results[0] += 1  # owned by the caller
        results[0] -= 1
    assert fused.lends
    for _ in range(4):
        assert (fused([mine])[0] == total()).all()
    for result in results:
        assert (result == total()).all()
    comm.world.Barrier()
    comm.free()


def test_memory_of_a_lent_result_is_freed_with_it(comm):
    mine = np.zeros(2**20, np.float32)
    fused = reduced(comm, [mine], lend=True)

    def mappings():
        keras_dist.barrier()
        gc.collect()
        with open("/proc/self/maps") as lines:
            return sum("/dev/shm" in line for line in lines)

    before = mappings()
    kept = [fused([mine])[0] for _ in range(4)]
    both = mappings()
    del fused
    alone = mappings()
    del kept
    assert (both, alone, mappings()) == (before + 2, before + 1, before)


def test_a_freed_communicator_frees_its_memory():
    mine = np.zeros(2**20, np.float32)
    gc.disable()  # no reference cycles: nothing waits for the garbage collector
    try:
        before = shared_nbytes()
        for _ in range(3):
            comm = _engine.Communicator(MPI, None)
            _engine.collectives.allreduce(comm, [mine], ["a"], SUM, 2**23)
            assert shared_nbytes() > before + mine.nbytes
            keras_dist.barrier()
            comm.free()
            del comm
        assert shared_nbytes() < before + 2**20
    finally:
        gc.enable()


def is_ready(plan):
    return plan.memory.ready_reduction(0) is not None


def test_idle_plans_free_their_memory(monkeypatch):
    monkeypatch.setattr(memory, "IDLE_UPDATES", 6)
    comm = _engine.Communicator(MPI, None)
    plans = [gradients_of(comm, 2**20 + number) for number in range(8)]
    peak = 0
    before = shared_nbytes()
    for used in itertools.pairwise(plans):
        for plan in 3 * used:  # two in turn, then others
            mine = np.full(plan.call.entries[0].shape, keras_dist.rank(), np.float32)
            assert plan([mine])[0][0] == total()
        peak = max(peak, shared_nbytes() - before)
    # Three results and a contribution of each rank.
    assert peak < 6 * (3 + keras_dist.size()) * plans[-1].buckets[0].nbytes
    assert [is_ready(plan) for plan in plans] == 6 * [False] + 2 * [True]
    mine = np.full(2**20, keras_dist.rank(), np.float32)
    assert plans[0]([mine])[0][0] == total()
    assert is_ready(plans[0])
    keras_dist.barrier()
    comm.free()
    assert not any(map(is_ready, plans))


@pytest.mark.parametrize("is_odd", [True, False], ids=["last rank", "all ranks"])
def test_a_graph_that_outlives_its_plan_is_an_error_on_all_ranks(is_odd):
    comm = _engine.Communicator(MPI)
    plan = gradients_of(comm, 1000)
    weak, mine = plan.weak(), np.ones(1000, np.float32)
    assert weak().reduce_bucket(0, [mine])[0][0] == keras_dist.size()
    if not is_odd or keras_dist.rank() == keras_dist.size() - 1:
        del plan
    texts = raised(errors.BackendError, lambda: weak().reduce_bucket(0, [mine]))
    assert "Received: a step that outlives them. Keep the optimizer" in texts[-1]
    assert gradients_of(comm, 7)([np.ones(7, np.float32)])[0][0] == keras_dist.size()
    comm.free()


def gradients_of(comm, count):
    specs = [((count,), np.dtype(np.float32))]
    plan = _engine.BucketOptions(2**23, counts_updates=True)
    return _engine.FusedAllreduce(comm, ["a"], specs, SUM, plan)


def shared_nbytes():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["RssShmem"].split()[0]) * 1024


# --- Leftover files and missing memory


def entries():
    return [name for name in os.listdir(segments.DIRECTORY) if name.startswith(segments.PREFIX)]


def seen_while_mapping(monkeypatch):
    """Returns a list that records our files, which are private, whenever memory is mapped."""
    seen = []
    map_it = segments.Segment.__init__

    def look(segment, *arguments):
        for name in entries():
            if f"-{os.getuid()}-" in name:
                seen.append(name)
                with contextlib.suppress(FileNotFoundError):  # of another job, which has mapped it
                    mode = os.stat(os.path.join(segments.DIRECTORY, name)).st_mode
                    assert stat.S_IMODE(mode) == 0o600
        map_it(segment, *arguments)

    monkeypatch.setattr(segments.Segment, "__init__", look)
    return seen


def no_such_files(monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # as of an old kernel


def hidden_processes(monkeypatch):
    """Makes each rank find another file, or none, under /proc, as in separate containers."""
    nameless = segments._create_nameless

    def create(nbytes):
        path, handle, trouble = nameless(nbytes)
        return path.replace(str(os.getpid()), "self"), handle, trouble

    monkeypatch.setattr(segments, "_create_nameless", create)


@pytest.mark.parametrize("hinder", [None, no_such_files, hidden_processes])
def test_memory_has_a_name_only_where_ranks_cannot_open_it_otherwise(monkeypatch, hinder):
    if hinder is not None:
        hinder(monkeypatch)
    seen = seen_while_mapping(monkeypatch)
    comm = _engine.Communicator(MPI)
    assert comm.node is not None
    names = set(seen)
    assert len(names) == (hinder is not None)
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    assert (reduced(comm, [mine])([mine])[0] == total()).all()
    assert (names != set(seen)) == (hinder is not None)
    keras_dist.barrier()
    assert not set(seen) & set(entries())
    comm.free()


def test_files_of_a_dead_job_are_removed():
    dead = 2**22 + 7  # above the largest process number
    left = f"{segments.DIRECTORY}/{segments.PREFIX}-{os.getuid()}-{dead}-{keras_dist.rank():016x}"
    alive = f"{segments.DIRECTORY}/{segments.PREFIX}-{os.getuid()}-{os.getpid()}-{0:016x}"
    for path in (left, alive):
        with open(path, "w"):
            pass
    try:
        segments.clean_up()
        assert not os.path.exists(left)
        assert os.path.exists(alive)
    finally:
        os.unlink(alive)


def test_memory_of_garbage_is_freed_before_more_is_refused(monkeypatch, caplog):
    comm = _engine.Communicator(MPI)
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    models = [reduced(comm, [mine])]
    assert (models[0]([mine])[0] == total()).all()
    models.append(models)  # refers to itself, as models do
    alive = weakref.ref(models[0])
    reserve = segments._reserve

    def full_while_alive(handle, nbytes):
        return "it is full" if alive() is not None else reserve(handle, nbytes)

    monkeypatch.setattr(segments, "_reserve", full_while_alive)
    del models
    assert (reduced(comm, [mine])([mine])[0] == total()).all()
    assert not caplog.records
    comm.free()


@contextlib.contextmanager
def limited(what, most):
    """Sets a limit of this process."""
    before, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (before, hard))


@contextlib.contextmanager
def no_more_files():
    """Lets this process open no more files."""
    gc.collect()  # the engine does, which may free some
    most = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as opened, limited(resource.RLIMIT_NOFILE, most):
        with contextlib.suppress(OSError):
            while True:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


NO_MEMORY = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
HINDRANCES = {
    "a full /dev/shm": (
        lambda: limited(resource.RLIMIT_FSIZE, 64 * 1024),
        "MiB are needed.*--shm-size=1g",
    ),
    "no address": (
        lambda: mock.patch.object(segments.mmap, "mmap", side_effect=NO_MEMORY),
        "cannot be mapped: Cannot allocate memory",
    ),
    "no more files": (
        no_more_files,
        "Too many open files. Let a process open more files, by ulimit -n(?!.*--shm-size)",
    ),
}


@pytest.mark.parametrize(
    ("what", "who"),
    [
        ("a full /dev/shm", "every rank"),
        ("no address", "the last rank"),
        ("no more files", "the last rank"),
        ("no more files", "every rank"),
    ],
)
def test_data_goes_through_mpi_where_memory_is_missing(caplog, what, who):
    hinder, text = HINDRANCES[what]
    with hinder() if what == "a full /dev/shm" else contextlib.nullcontext():
        comm = _engine.Communicator(MPI)
    assert comm.node is not None  # the segment of a barrier is small enough
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    is_odd = who == "every rank" or comm.rank == comm.size - 1
    for _ in range(2):
        fused = reduced(comm, [mine], lend=True)
        with hinder() if is_odd else contextlib.nullcontext():
            assert (fused([mine])[0] == total()).all()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (comm.rank == 0)
    assert all(re.search(text, each) for each in said), said
    comm.free()


def test_without_shared_memory_data_goes_through_mpi(monkeypatch, caplog):
    monkeypatch.setattr(segments, "DIRECTORY", "/nowhere/shm")
    comm = _engine.Communicator(MPI)
    assert comm.node is None
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    assert (reduced(comm, [mine])([mine])[0] == total()).all()
    assert ("no file can be made in /nowhere/shm" in caplog.text) == (comm.rank == 0)
    comm.free()
