"""Launches of NCCL over its test double: errors, order, timeline and copies; see `gpu_double`."""

import sys
import threading

import keras
import numpy as np
import pytest
import traces
from gpu_arrays import assert_same, both_ways, contribution, launches, on_gpu

import keras_dist
from keras_dist import _engine, _gpu, errors, runtime
from keras_dist._engine.nccl.ranks import NcclRanks
from keras_dist.monitor.timeline import summary as timeline
from keras_dist.ops import gradient_plans

pytestmark = [
    pytest.mark.jobs("double-torch-3"),
    pytest.mark.skipif(not _gpu.counts_host_memory(), reason="without a GPU or its test double"),
    pytest.mark.usefixtures("ranks"),
]

C = _engine.collectives
SUM = _engine.ReduceOp.SUM
PINNED = _engine.GpuPath(False, "a test")


@pytest.fixture
def ranks():
    if keras_dist.size() == 1:
        pytest.skip("one rank reduces nothing")


# --- Errors of one rank between the agreement and the launch


def fails_on_one(monkeypatch, owner, name, error, rank=-1):
    """Makes a function raise an error on a rank, by default the last one."""

    def fail(*args, **kwargs):
        raise error

    if keras_dist.rank() == range(keras_dist.size())[rank]:
        monkeypatch.setattr(owner, name, fail)


def assert_all_raise_and_continue(monkeypatch, operation, text, rank=-1):
    rank = range(keras_dist.size())[rank]
    where = rf"\[rank {rank} of {keras_dist.size()}\] Expected every rank to {text}"
    with pytest.raises(errors.RankError, match=where) as told:
        operation()
    assert told.value.rank == rank
    assert isinstance(told.value.__cause__, Exception) == (keras_dist.rank() == rank)
    monkeypatch.undo()
    assert_same(both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20))
    everyone = keras_dist.allgather_object(len(launches()) > 0)
    assert all(everyone)


def operations():
    comm = runtime.communicator()
    options = _engine.OpOptions(SUM, prescale=0.75)
    return {
        "allreduce": lambda x: C.allreduce(comm, [x], ["x"], options, 2**20),
        "allgather": lambda x: C.grouped_allgather(comm, [x], ["x"]),
        "broadcast": lambda x: C.broadcast(comm, [x], ["x"], 0),
        "reducescatter": lambda x: C.reducescatter(comm, [x], ["x"], options),
    }


FAILURES = [("allreduce", _gpu.Runtime, "new_stream", MemoryError)]
FAILURES += [
    ("allreduce", _gpu.Nccl, call, _gpu.NcclError)
    for call in ("start", "allreduce", "end", "new_factor", "init", "unique_id")
]
FAILURES += [
    (name, _gpu.DeviceArray, "empty", MemoryError)
    for name in ("allreduce", "allgather", "broadcast", "reducescatter")
]


@pytest.mark.jobs("double-torch-2")  # whose launches take longer
@pytest.mark.parametrize(("name", "owner", "call", "kind"), FAILURES)
def test_an_error_of_one_rank_before_its_launch(monkeypatch, name, owner, call, kind):
    comm = runtime.communicator()
    if call in ("init", "unique_id", "new_stream") and comm.nccl is not None:
        comm.nccl.close()
        comm.nccl = None
    rank = 0 if call == "unique_id" else -1  # rank 0 makes the id
    fails_on_one(monkeypatch, owner, call, kind("on purpose"), rank)
    mine = on_gpu(np.ones((4, 2), "float32"))
    text = rf"launch {name}\('x'\)\. .*{kind.__name__}: on purpose"
    assert_all_raise_and_continue(monkeypatch, lambda: operations()[name](mine), text, rank)


# --- Operations like earlier ones, which are launched before the ranks meet


def known(comm, *lengths):
    """Returns functions that add up arrays of some lengths, as the ranks have done before."""
    comm.meets_once = True  # tests before this one may have abandoned launches

    def add(length):
        mine = on_gpu(np.full(length, comm.rank + 1, "float32"))
        (result,) = C.allreduce(comm, [mine], ["x"], _engine.OpOptions(SUM), 2**20)
        return result.finish(None).tolist()

    for length in lengths:
        assert add(length) == total(comm, length)
    return [lambda length=length: add(length) for length in lengths]


def total(comm, length):
    return [sum(range(1, comm.size + 1))] * length


def test_a_repeated_operation_takes_one_meeting():
    comm = runtime.communicator()
    (add,) = known(comm, 101)
    before, met = len(launches()), C.rendezvous_count()
    for _ in range(3):
        assert add() == total(comm, 101)
    assert launches()[before:] == [["ncclAllReduce"]] * 3
    assert C.rendezvous_count() - met == 3


def test_ranks_that_launch_different_repeated_operations():
    comm = runtime.communicator()
    first, second = known(comm, 102, 103)
    with pytest.raises(errors.MismatchError, match=r"shape \(102,\) as on rank 0. Received: \(103"):
        (second if comm.rank == comm.size - 1 else first)()
    met = C.rendezvous_count()
    for _ in range(2):
        assert (first(), second()) == (total(comm, 102), total(comm, 103))
    assert C.rendezvous_count() - met == 8  # from now on they meet before a launch


def test_a_rank_calls_something_else_than_a_repeated_operation():
    comm = runtime.communicator()
    (add,) = known(comm, 104)
    with pytest.raises(errors.MismatchError, match="Received: barrier"):
        if comm.rank == comm.size - 1:
            keras_dist.barrier()
        else:
            add()
    assert add() == total(comm, 104)


def test_a_repeated_operation_fails_on_one_rank(monkeypatch):
    comm = runtime.communicator()
    (add,) = known(comm, 105)
    fails_on_one(monkeypatch, _gpu.DeviceArray, "empty", MemoryError("no memory for a result"))
    assert_all_raise_and_continue(
        monkeypatch, add, r"launch allreduce\('x'\)\. .*MemoryError: no memory for a result"
    )


def test_a_rank_joins_before_a_repeated_operation():
    comm = runtime.communicator()
    (add,) = known(comm, 106)
    if comm.rank < comm.size - 1:
        for _ in range(2):
            assert add() == [sum(range(1, comm.size))] * 106
    keras_dist.join()
    assert add() == total(comm, 106)


def test_a_named_operation_comes_before_a_repeated_one_on_one_rank():
    comm = runtime.communicator()
    (add,) = known(comm, 107)
    mine = on_gpu(np.ones(3, "float32"))

    def named():
        return C.broadcast(comm, [mine], ["x"], 0, key="named")

    if comm.rank == comm.size - 1:
        named()
        assert add() == total(comm, 107)
    else:
        handle = comm.order.queue(add, "allreduce")
        named()
        assert handle.wait() == total(comm, 107)


def three_buckets():
    names, specs = list("abc"), [((4,), np.dtype("float32"))] * 3
    options, plan = _engine.OpOptions(SUM), _engine.BucketOptions(16)
    return _engine.FusedAllreduce(runtime.communicator(), names, specs, options, plan)


def test_a_launch_that_fails_in_the_middle_of_a_step(monkeypatch):
    calls, allreduce = [], _gpu.Nccl.allreduce

    def fail_in_the_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise _gpu.NcclError("a code of NCCL")
        allreduce(*args)

    fused = three_buckets()
    both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20)
    if keras_dist.rank() == keras_dist.size() - 1:
        monkeypatch.setattr(_gpu.Nccl, "allreduce", fail_in_the_second)
    arrays = [on_gpu(np.ones(4, "float32")) for _ in range(3)]
    handles = [fused.queue_bucket(number, [array]) for number, array in enumerate(arrays)]
    with pytest.raises(errors.RankError, match="a code of NCCL"):
        handles[2].wait()
    monkeypatch.undo()
    for (result,) in (fused.reduce_bucket(number, [array]) for number, array in enumerate(arrays)):
        assert result.finish(None).tolist() == [keras_dist.size()] * 4


def test_a_rank_that_leaves_a_step_in_the_middle():
    comm, fused = runtime.communicator(), three_buckets()
    arrays = [on_gpu(np.ones(4, "float32")) for _ in range(3)]
    leaves = comm.rank == comm.size - 1
    with pytest.raises(errors.MismatchError, match=rf"rank {comm.size - 1} of .*Received: barrier"):
        for number, array in enumerate(arrays[: 2 if leaves else 3]):
            fused.reduce_bucket(number, [array])
        keras_dist.barrier()
    found = fused(arrays)
    assert [result.finish(None).tolist() for result in found] == [[comm.size] * 4] * 3


def test_ranks_that_leave_a_step_at_different_buckets():
    comm, fused = runtime.communicator(), three_buckets()
    arrays = [on_gpu(np.ones(4, "float32")) for _ in range(3)]
    for number in range(1 + (comm.rank == 0)):
        fused.reduce_bucket(number, [arrays[number]])
    with pytest.raises(errors.MismatchError, match=r"after 2 launches as on rank 0.*: 1 launches"):
        keras_dist.barrier()
    found = fused(arrays)
    assert [result.finish(None).tolist() for result in found] == [[comm.size] * 4] * 3


def test_other_operations_between_the_buckets_of_a_step():
    comm, first, second = runtime.communicator(), three_buckets(), three_buckets()
    arrays = [on_gpu(np.full(4, number, "float32")) for number in range(3)]
    results = []
    for number, array in enumerate(arrays):
        results += first.reduce_bucket(number, [array])
        assert keras_dist.allreduce(1.0, "sum") == comm.size
        results += second.reduce_bucket(number, [array])
        results += C.allreduce(comm, [array], ["x"], _engine.OpOptions(SUM), 2**20)
    for number, result in enumerate(results):
        assert result.finish(None).tolist() == [comm.size * (number // 3)] * 4


def test_the_launch_before_a_failed_one_ends_on_all_ranks(monkeypatch):
    comm, options, released = runtime.communicator(), _engine.OpOptions(SUM), threading.Event()
    both_ways(C.allreduce, [contribution("float32")], options, 2**20)  # the ranks are connected
    give_up = NcclRanks.give_up

    def release_and_give_up(*args):
        released.set()
        give_up(*args)

    monkeypatch.setattr(NcclRanks, "give_up", release_and_give_up)
    # The first launch cannot end before the second one has failed.
    sys.modules["keras_dist_gpu_double"].enqueue(comm.nccl._stream, released.wait)
    mine = on_gpu(np.ones(3, "float32"))
    (first,) = C.allreduce(comm, [mine], ["first"], options, 2**20)
    fails_on_one(monkeypatch, _gpu.Nccl, "end", _gpu.NcclError("a code of NCCL"))
    with pytest.raises(errors.RankError, match="a code of NCCL"):
        C.allreduce(comm, [mine], ["second"], options, 2**20)
    assert first.finish(None).tolist() == [comm.size] * 3


def test_a_launch_that_nccl_has_failed_before_is_not_awaited(monkeypatch):
    comm, options, released = runtime.communicator(), _engine.OpOptions(SUM), threading.Event()
    both_ways(C.allreduce, [contribution("float32")], options, 2**20)
    sys.modules["keras_dist_gpu_double"].enqueue(comm.nccl._stream, released.wait)
    mine = on_gpu(np.ones(3, "float32"))
    (first,) = C.allreduce(comm, [mine], ["first"], options, 2**20)
    if comm.rank == comm.size - 1:
        comm.nccl.abort(_gpu.NcclError("an error on the network"))  # as the watch does
    with pytest.raises(errors.RankError, match="an error on the network"):
        C.allreduce(comm, [mine], ["second"], options, 2**20)
    with pytest.raises(errors.RankError, match="an error on the network"):
        first.finish(None)
    released.set()
    both_ways(C.allreduce, [contribution("float32")], options, 2**20)


def test_a_failed_launch_in_a_process_set(monkeypatch):
    size = keras_dist.size()
    process_set = keras_dist.add_process_set([0, size - 1])
    try:
        if runtime.includes_me(process_set):
            comm = runtime.communicator(process_set)
            fails_on_one(monkeypatch, _gpu.Nccl, "end", _gpu.NcclError("a code of NCCL"))
            mine = on_gpu(np.ones(3, "float32"))
            with pytest.raises(errors.RankError, match=rf"\[rank {size - 1} of {size}\]"):
                C.allreduce(comm, [mine], ["x"], _engine.OpOptions(SUM), 2**20)
            monkeypatch.undo()
            (found,) = C.allreduce(comm, [mine], ["x"], _engine.OpOptions(SUM), 2**20)
            assert found.finish(0).tolist() == [2.0] * 3
    finally:
        keras_dist.remove_process_set(process_set)


def test_no_pinned_memory_on_one_rank(monkeypatch):
    for name in ("allreduce", "broadcast"):
        monkeypatch.setattr(runtime.communicator(), "gpu_path", PINNED)
        fails_on_one(monkeypatch, _gpu.Runtime, "pinned", MemoryError("nothing to pin"))
        mine = on_gpu(np.ones((4, 2), "float32"))
        text = rf"prepare {name}\. .*MemoryError: nothing to pin"
        with pytest.raises(errors.RankError, match=text):
            operations()[name](mine)
        monkeypatch.undo()
    assert_same(both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20))


def test_a_named_operation_fails_by_its_name(monkeypatch):
    comm = runtime.communicator()
    monkeypatch.setattr(comm, "gpu_path", PINNED)
    with monkeypatch.context() as patched:
        fails_on_one(patched, _gpu.Runtime, "pinned", MemoryError("nothing to pin"))
        mine, host = on_gpu(np.ones(3, "float32")), np.ones(3, "float32")

        def named():
            return C.broadcast(comm, [mine], ["x"], 0, key="named")

        # The last rank calls it first, the others last.
        if comm.rank == comm.size - 1:
            wait = comm.order.queue(named, "broadcast", "named").wait
        else:
            wait = named
        (other,) = C.broadcast(comm, [host], ["y"], 0, key="other")
        assert other.tolist() == host.tolist()
        with pytest.raises(errors.RankError, match="nothing to pin"):
            wait()


# --- Buckets on their way at once, in training


def fitted(monkeypatch, bucket_nbytes, overlaps):
    """Returns a model after training in steps that reduce several buckets."""
    monkeypatch.setattr(gradient_plans, "bucket_nbytes", lambda *_: bucket_nbytes)
    monkeypatch.setattr(gradient_plans, "overlaps", lambda _: overlaps)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16), keras.layers.ReLU(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, loss="mse", jit_compile=False)
    random = np.random.default_rng(keras_dist.rank())
    x, y = random.normal(size=(12, 4)).astype("f4"), random.normal(size=(12, 1)).astype("f4")
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=keras_dist.callbacks())
    return model


@pytest.mark.jobs("double-tensorflow-2")
@pytest.mark.parametrize(("path", "what"), [("NCCL", "launch"), ("pinned", "prepare")])
def test_no_memory_for_a_prepared_result_on_one_rank(monkeypatch, path, what):
    is_torch = keras.backend.backend() == "torch"
    comm, prepare = runtime.communicator(), _gpu.DeviceArray.prepare
    if path == "pinned":
        monkeypatch.setattr(comm, "gpu_path", PINNED)

    def no_memory(*_):
        raise MemoryError("no memory for a result")

    def prepare_without_memory(array):
        array._allocate = no_memory
        prepare(array)

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(_gpu.DeviceArray, "prepare", prepare_without_memory)
    last = rf"\[rank {comm.size - 1} of {comm.size}\]"
    text = rf"(?s){last} Expected every rank to {what} .*MemoryError: no memory for a result"
    with pytest.raises(Exception, match=text):  # TensorFlow has errors of its own
        fitted(monkeypatch, 1, overlaps=is_torch)
    comm.order.drain()  # the other buckets have failed as well
    monkeypatch.undo()
    assert_same(both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20))


def trained(monkeypatch, bucket_nbytes):
    """Returns the weights after training on TensorFlow, and the order of launches and results."""
    from keras_dist._engine import FusedAllreduce

    order = []
    queue = FusedAllreduce.queue_bucket

    def queue_bucket(self, number, *args):
        order.append(("started", number))
        handle = queue(self, number, *args)
        wait = handle.wait
        handle.wait = lambda: order.append(("awaited", number)) or wait()
        return handle

    with monkeypatch.context() as patched:
        patched.setattr(FusedAllreduce, "queue_bucket", queue_bucket)
        model = fitted(patched, bucket_nbytes, overlaps=False)
    return [weight.tobytes() for weight in model.get_weights()], order


@pytest.mark.jobs("double-tensorflow-2")
@pytest.mark.parametrize("path", ["NCCL", "pinned"])
def test_tensorflow_starts_all_buckets_before_it_waits(monkeypatch, path):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("torch queues from hooks, JAX starts all in one host call")
    comm = runtime.communicator()
    if path == "pinned":
        monkeypatch.setattr(comm, "gpu_path", PINNED)
    together, no_order = trained(monkeypatch, 2**20)
    apart, order = trained(monkeypatch, 1)
    assert no_order == []
    assert order == [(what, n) for what in ("started", "awaited") for n in range(4)] * 3
    assert together == apart


def test_the_timeline_shows_agreement_launch_and_wait(shared_tmp_path):
    comm = runtime.communicator()
    mine = [on_gpu(np.ones(1000, "float32"))]
    path = shared_tmp_path / "t.json"
    keras_dist.start_timeline(path)
    (found,) = C.allreduce(comm, mine, ["x"], _engine.OpOptions(SUM), 2**20)
    found.finish(None)
    comm.nccl._watch.drain()  # its thread has recorded the operation
    keras_dist.stop_timeline()
    keras_dist.barrier()  # rank 0 has written it
    trace = traces.load(path)
    lanes = traces.lanes_of(trace)
    for rank in range(comm.size):
        bars = traces.bars(trace, rank=rank)
        seen = [(lanes[bar["pid"], bar["tid"]], bar["name"]) for bar in bars]
        for name in ("allreduce", "launch"):
            assert seen.count(("communication", name)) == 1
        assert seen.count(("communication", "wait for ranks")) >= 2
        assert ("training", "wait for the GPU") in seen
        assert ("thread keras_dist gpu", "allreduce on the GPU") in seen
        [call] = [bar for bar in bars if bar["name"] == "allreduce"]
        [launch] = [bar for bar in bars if bar["name"] == "launch"]
        assert call["ts"] <= launch["ts"] <= call["ts"] + call["dur"]
    assert timeline.summarise(str(path)).ranks.keys() == set(range(comm.size))


def test_the_gpu_copies_from_and_to_pinned_memory_alone(monkeypatch):
    comm, pinned, copies, kept = runtime.communicator(), [], [], []
    allocate, copy = _gpu.Runtime.pinned, _gpu.Runtime.copy

    def record_memory(self, nbytes):
        memory = allocate(self, nbytes)
        pinned.append((memory.ctypes.data, max(1, memory.nbytes)))
        kept.append(memory)  # nothing else gets its address
        return memory

    def is_pinned(address, nbytes):
        return any(low <= address and address + nbytes <= low + size for low, size in pinned)

    def record_copy(self, target, source, nbytes, stream):
        if nbytes:
            copies.append((is_pinned(target, nbytes), is_pinned(source, nbytes)))
        copy(self, target, source, nbytes, stream)

    monkeypatch.setattr(_gpu.Runtime, "pinned", record_memory)
    monkeypatch.setattr(_gpu.Runtime, "copy", record_copy)
    monkeypatch.setattr(comm, "gpu_path", PINNED)
    arrays = [contribution("float32", (n,)) for n in (3, 0, 500, 1000)]
    before = len(launches())
    for nbytes in (16, 2**20, 2**20):
        for op in (_engine.ReduceOp.AVERAGE, _engine.ReduceOp.MAX):
            assert_same(both_ways(C.allreduce, arrays, _engine.OpOptions(op), nbytes))
    assert_same(both_ways(C.broadcast, arrays, 0))
    assert_same(both_ways(C.grouped_allgather, arrays))
    assert_same(both_ways(C.reducescatter, arrays, _engine.OpOptions()))
    rows, numbers = contribution("float32", (4, 3)), np.arange(4)
    C.reduce_slices(comm, on_gpu(rows), on_gpu(numbers), "table", _engine.OpOptions(SUM))

    assert len(launches()) == before
    assert len(copies) > 20
    assert set(copies) == {(True, False), (False, True)}
