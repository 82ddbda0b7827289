"""Reductions in shared memory: results that are lent, memory that is missing, and no file left."""

import contextlib
import errno
import gc
import itertools
import os
import resource
import stat
import weakref

import numpy as np
import pytest
from mpi4py import MPI
from test_collectives import raised

import keras_dist
from keras_dist import _engine, errors
from keras_dist._engine import memory
from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.shm import bucket_reduction as limits
from keras_dist._engine.shm import segments

pytestmark = pytest.mark.jobs("engine", "torch-3")

WAYS = ("copy", "mpi")
LARGE = 2**20


@pytest.fixture(scope="module")
def comms():
    made = {way: _engine.Communicator(MPI, None, way) for way in WAYS}
    yield made
    for comm in made.values():
        comm.free()


def several():
    if keras_dist.size() == 1:
        pytest.skip("one rank shares memory with nobody")


def reduced(comm, arrays, op, bucket_nbytes=2**23, lend=False):
    specs = [(array.shape, array.dtype) for array in arrays]
    names = [str(number) for number in range(len(arrays))]
    plan = _engine.BucketOptions(bucket_nbytes, lend=lend)
    return _engine.FusedAllreduce(comm, names, specs, _engine.OpOptions(op), plan)


def test_only_copies_use_shared_memory(comms):
    several()
    assert comms["copy"].node is not None
    assert comms["mpi"].node is None


def test_lent_results_are_in_shared_memory_which_is_reused(comms):
    several()
    mine = np.full(LARGE, keras_dist.rank(), np.float32)
    fused = reduced(comms["copy"], [mine], ReduceOp.SUM, lend=True)
    total = keras_dist.size() * (keras_dist.size() - 1) / 2
    last, places = None, []
    for number in range(7):
        result = fused([mine + number])[0]
        if last is not None:  # valid until the second call after its own
            assert (last == total + (number - 1) * keras_dist.size()).all()
        assert (result == total + number * keras_dist.size()).all()
        places.append(result.ctypes.data)
        last = result
    assert len(set(places)) == 3 and places[3:] == places[:-3]
    assert all(place % 64 == 0 for place in places)
    keras_dist.barrier()


def test_a_write_to_a_lent_result_is_private(comms):
    several()
    size = keras_dist.size()
    arrays = [np.full(count, keras_dist.rank(), np.float32) for count in (2**20, 2**18 + 1)]
    fused = reduced(comms["copy"], arrays, ReduceOp.SUM, 2**23, lend=True)
    total, places = size * (size - 1) / 2, []
    for number in range(9):
        results = fused([array + number for array in arrays])
        places.append(results[0].ctypes.data)
        keras_dist.barrier()
        if number == 2 and keras_dist.rank() == 0:
            results[1][-1] = -1
        keras_dist.barrier()
        for result in results:
            expected = np.full(result.size, total + number * size, np.float32)
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
    several()
    comm = _engine.Communicator(MPI, None)
    mine = np.full(2**20, keras_dist.rank(), np.float32)
    with monkeypatch.context() as patched:
        if keras_dist.rank() == 0:
            patched.setattr(segments, "_is_supported", lambda: False)
        fused = reduced(comm, [mine], ReduceOp.SUM, lend=True)
        results = [fused([mine])[0] for _ in range(2)]
    if keras_dist.rank() == 0:
        results[0] += 1  # owned by the caller
        results[0] -= 1
    assert fused.lends
    for _ in range(4):
        assert (fused([mine])[0] == sum(range(keras_dist.size()))).all()
    for result in results:
        assert (result == sum(range(keras_dist.size()))).all()
    comm.world.Barrier()
    comm.free()


def test_memory_of_a_lent_result_is_freed_with_it(comms):
    several()
    mine = np.zeros(2**20, np.float32)
    fused = reduced(comms["copy"], [mine], ReduceOp.SUM, lend=True)

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


def test_memory_that_one_rank_cannot_map_is_used_by_none(monkeypatch, caplog):
    several()
    comm = _engine.Communicator(MPI, None)
    mine = np.full(limits.SMALL_NBYTES, keras_dist.rank(), np.float32)
    fused = reduced(comm, [mine], ReduceOp.SUM)
    with monkeypatch.context() as patched:
        if keras_dist.rank() == keras_dist.size() - 1:
            patched.setattr(segments.mmap, "mmap", refused)
        result = fused([mine])[0]
    assert (result == sum(range(keras_dist.size()))).all()
    if keras_dist.rank() == 0:
        assert "cannot be mapped: Cannot allocate memory" in caplog.text
    keras_dist.barrier()
    comm.free()


def test_a_slice_that_one_rank_cannot_reduce_is_an_error_on_all(monkeypatch, comms):
    several()
    mine = np.full(LARGE, keras_dist.rank(), np.float32)
    fused = reduced(comms["copy"], [mine], ReduceOp.SUM)
    expected = fused([mine])[0]
    odd = keras_dist.rank() == keras_dist.size() - 1

    def broken(*_):
        raise MemoryError("on purpose")

    with monkeypatch.context() as patched:
        if odd:
            patched.setattr(limits, "reduce_each", broken)
        with pytest.raises(errors.RankError, match="on purpose" if odd else "another rank"):
            fused([mine])
    np.testing.assert_array_equal(fused([mine])[0], expected)


def refused(*_):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_a_freed_communicator_frees_its_memory():
    several()
    mine = np.zeros(2**20, np.float32)
    gc.disable()  # no reference cycles: nothing waits for the garbage collector
    try:
        before = shared_nbytes()
        for _ in range(3):
            comm = _engine.Communicator(MPI, None)
            _engine.collectives.allreduce(
                comm, [mine], ["a"], _engine.OpOptions(ReduceOp.SUM), 2**23
            )
            assert shared_nbytes() > before + mine.nbytes
            keras_dist.barrier()
            comm.free()
            del comm
        assert shared_nbytes() < before + 2**20
    finally:
        gc.enable()


def test_idle_plans_free_their_memory(monkeypatch):
    several()
    monkeypatch.setattr(memory, "IDLE_UPDATES", 6)
    comm = _engine.Communicator(MPI, None)
    plans = [gradients_of(comm, 2**20 + number) for number in range(8)]
    peak = 0
    before = shared_nbytes()
    for used in itertools.pairwise(plans):
        for plan in 3 * used:  # two in turn, then others
            mine = np.full(plan.call.entries[0].shape, keras_dist.rank(), np.float32)
            assert plan([mine])[0][0] == sum(range(keras_dist.size()))
        peak = max(peak, shared_nbytes() - before)
    # Three results and a contribution of each rank.
    assert peak < 6 * (3 + keras_dist.size()) * plans[-1].buckets[0].nbytes
    assert [plan.memory.is_ready(0) for plan in plans] == 6 * [False] + 2 * [True]
    mine = np.full(2**20, keras_dist.rank(), np.float32)
    assert plans[0]([mine])[0][0] == sum(range(keras_dist.size()))
    assert plans[0].memory.is_ready(0)
    keras_dist.barrier()
    comm.free()
    assert not any(plan.memory.is_ready(0) for plan in plans)


@pytest.mark.parametrize("is_odd", [True, False], ids=["last rank", "all ranks"])
def test_a_graph_that_outlives_its_plan_is_an_error_on_all_ranks(is_odd):
    several()
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
    return _engine.FusedAllreduce(comm, ["a"], specs, _engine.OpOptions(ReduceOp.SUM), plan)


def shared_nbytes():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["RssShmem"].split()[0]) * 1024


# --- Leftover files and missing memory


def entries():
    return [name for name in os.listdir(segments.DIRECTORY) if name.startswith(segments.PREFIX)]


def test_no_file_is_left_while_the_job_runs(comms):
    several()
    mine = np.ones(300_000, np.float32)
    reduced(comms["copy"], [mine], ReduceOp.SUM)([mine])
    keras_dist.barrier()
    own = [name for name in entries() if f"-{os.getpid()}-" in name]
    assert own == []


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


def test_memory_has_no_name(monkeypatch):
    several()
    seen = seen_while_mapping(monkeypatch)
    comm = _engine.Communicator(MPI)
    assert comm.node is not None
    assert seen == []
    comm.free()


def no_such_files(monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")


def hidden_processes(monkeypatch):
    """Makes each rank find another file, or none, under /proc, as in separate containers."""
    nameless = segments._create_nameless

    def create(nbytes):
        path, handle, trouble = nameless(nbytes)
        return path.replace(str(os.getpid()), "self"), handle, trouble

    monkeypatch.setattr(segments, "_create_nameless", create)


@pytest.mark.parametrize("hinder", [no_such_files, hidden_processes])
def test_memory_has_a_name_where_ranks_cannot_open_it_otherwise(monkeypatch, hinder):
    several()
    hinder(monkeypatch)
    seen = seen_while_mapping(monkeypatch)
    comm = _engine.Communicator(MPI)
    assert comm.node is not None
    assert len(set(seen)) == 1
    keras_dist.barrier()
    assert seen[0] not in entries()
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    assert (reduced(comm, [mine], ReduceOp.SUM)([mine])[0] == sum(range(keras_dist.size()))).all()
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


@pytest.fixture
def little_room():
    """Limits the files of this process to 64 KiB, like a full /dev/shm."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_data_goes_through_mpi_where_shared_memory_is_full(comms, little_room, caplog):
    several()
    comm = _engine.Communicator(MPI)
    assert comm.node is not None  # the segment of a barrier is small enough
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    total = keras_dist.size() * (keras_dist.size() - 1) / 2
    for _ in range(2):
        fused = reduced(comm, [mine], ReduceOp.SUM)
        assert (fused([mine])[0] == total).all()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if comm.rank == 0 else 0)
    if said:
        assert "MiB are needed" in said[0]
        assert "--shm-size=1g" in said[0]
    comm.free()


@pytest.fixture
def no_more_files():
    """Returns a function that lets this process open no more files, to the end of the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []

    def use_up():
        most = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))

    yield use_up
    for handle in opened:
        os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("is_odd", [True, False], ids=["last rank", "all ranks"])
def test_data_goes_through_mpi_where_no_more_files_can_be_opened(no_more_files, caplog, is_odd):
    several()
    comm = _engine.Communicator(MPI)
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    fused = reduced(comm, [mine], ReduceOp.SUM, lend=True)
    gc.collect()  # the engine does, which may free some
    if not is_odd or keras_dist.rank() == keras_dist.size() - 1:
        no_more_files()
    assert (fused([mine])[0] == sum(range(keras_dist.size()))).all()
    if comm.rank == 0:
        assert "Too many open files. Let a process open more files, by ulimit -n" in caplog.text
        assert "--shm-size" not in caplog.text


def test_memory_of_garbage_is_freed_before_more_is_refused(monkeypatch, caplog):
    several()
    comm = _engine.Communicator(MPI)
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    models = [reduced(comm, [mine], ReduceOp.SUM)]
    assert (models[0]([mine])[0] == sum(range(keras_dist.size()))).all()
    models.append(models)  # refers to itself, as models do
    alive = weakref.ref(models[0])
    reserve = segments._reserve

    def full_while_alive(handle, nbytes):
        return "it is full" if alive() is not None else reserve(handle, nbytes)

    monkeypatch.setattr(segments, "_reserve", full_while_alive)
    del models
    assert (reduced(comm, [mine], ReduceOp.SUM)([mine])[0] == sum(range(keras_dist.size()))).all()
    assert not caplog.records
    comm.free()


def test_without_shared_memory_data_goes_through_mpi(monkeypatch, caplog):
    several()
    monkeypatch.setattr(segments, "DIRECTORY", "/nowhere/shm")
    comm = _engine.Communicator(MPI)
    assert comm.node is None
    mine = np.full(200_000, keras_dist.rank(), np.float32)
    total = keras_dist.size() * (keras_dist.size() - 1) / 2
    assert (reduced(comm, [mine], ReduceOp.SUM)([mine])[0] == total).all()
    if comm.rank == 0:
        assert "no file can be made in /nowhere/shm" in caplog.text
    comm.free()
