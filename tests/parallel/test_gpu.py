"""Arrays in GPU memory, over a test double of NCCL and CUDA's runtime; see `gpu_double`."""

import sys

import ml_dtypes
import numpy as np
import pytest
import traces

import keras_dist
from keras_dist import _engine, _gpu, errors, runtime
from keras_dist.monitor.timeline import summary as timeline

pytestmark = [
    pytest.mark.skipif(not _gpu.counts_host_memory(), reason="without a GPU or its test double"),
    pytest.mark.usefixtures("ranks"),
]

C = _engine.collectives
AVERAGE, SUM, MIN, MAX, PRODUCT, _ = _engine.ReduceOp
DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "int64", "uint8", "bool"]


@pytest.fixture
def ranks():
    if keras_dist.size() == 1:
        pytest.skip("one rank reduces nothing")


def on_gpu(array):
    """Returns an array in the memory of the double's GPU."""
    array = np.ascontiguousarray(array)

    def allocate(shape, dtype):
        return on_gpu(np.full(shape, 77, dtype))

    address = array.ctypes.data
    return _gpu.DeviceArray(address, array.shape, array.dtype, array, allocate, stream=0)


def values(arrays):
    return [array.finish(0) for array in arrays]


def launches():
    return sys.modules["keras_dist_gpu_double"].launches


def contribution(dtype, shape=(3, 5)):
    """Returns small numbers of this rank, which every dtype holds exactly."""
    generator = np.random.default_rng(runtime.rank())
    return generator.integers(0, 3, shape).astype(dtype)


def both_ways(operation, arrays, *args):
    """Returns the results of an operation in GPU memory and on the host."""
    comm = runtime.communicator()
    names = [f"array {index}" for index in range(len(arrays))]
    here = values(operation(comm, [on_gpu(array) for array in arrays], names, *args))
    return here, operation(comm, arrays, names, *args)


def assert_same(results):
    here, host = results
    for ours, theirs in zip(here, host, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("op", [AVERAGE, SUM, MIN, MAX, PRODUCT])
def test_reductions_of_every_dtype(op):
    dtypes = [dtype for dtype in DTYPES if op not in (SUM, AVERAGE) or dtype != "bool"]
    arrays = [contribution(dtype) for dtype in dtypes]
    assert_same(both_ways(C.allreduce, arrays, _engine.OpOptions(op), 2**20))


def test_factors():
    arrays = [contribution("float32"), contribution("float16"), contribution(ml_dtypes.bfloat16)]
    options = _engine.OpOptions(SUM, prescale=0.5, postscale=0.25)
    assert_same(both_ways(C.allreduce, arrays, options, 2**20))
    # A third is not exact in these dtypes.
    options = _engine.OpOptions(SUM, postscale=1 / 3)
    before = len(launches())
    assert_same(both_ways(C.allreduce, arrays[1:], options, 2**20))
    assert len(launches()) == before


def test_arrays_of_a_bucket_are_launched_at_once():
    arrays = [contribution("float32", (n,)) for n in (3, 0, 5, 7)]
    before = len(launches())
    assert_same(both_ways(C.allreduce, arrays, _engine.OpOptions(), 2**20))
    assert launches()[before:] == [["ncclAllReduce"] * 3]


def test_broadcast_from_every_root():
    arrays = [contribution(dtype) for dtype in DTYPES]
    for root in range(keras_dist.size()):
        assert_same(both_ways(C.broadcast, arrays, root))


def test_allgather_of_different_lengths():
    rank = keras_dist.rank()
    arrays = [contribution("float32", (rank, 3)), contribution("int64", (2,))]
    before = len(launches())
    assert_same(both_ways(C.grouped_allgather, arrays))
    assert len(launches()) == before + 1


def test_reducescatter_of_rows_that_do_not_divide():
    size = keras_dist.size()
    arrays = [contribution("float32", (2 * size + 1, 3)), contribution("float64", (1,))]
    for op in (SUM, AVERAGE):
        assert_same(both_ways(C.reducescatter, arrays, _engine.OpOptions(op)))


@pytest.mark.parametrize("op", [SUM, AVERAGE])
def test_rows_are_gathered_and_added_up_by_the_framework(op):
    comm, rank = runtime.communicator(), keras_dist.rank()
    values = contribution("float32", (rank + 1, 3))
    indices = np.arange(rank + 1) * 2 + rank % 2
    options = _engine.OpOptions(op)
    before = len(launches())
    rows, numbers, count = C.reduce_slices(comm, on_gpu(values), on_gpu(indices), "table", options)
    assert len(launches()) == before + 1
    expected, where = C.reduce_slices(comm, values, indices, "table", options)
    total = np.zeros_like(expected)
    found, inverse = np.unique(numbers.finish(0), return_inverse=True)
    np.add.at(total, inverse, rows.finish(0))
    assert found.tolist() == where.tolist()
    assert (total / np.float32(count) == expected).all()


def test_a_process_set_has_a_communicator_of_its_own():
    size = keras_dist.size()
    members = [[size - 1], *([[0, size - 1]] if size > 2 else [])]
    sets = [keras_dist.add_process_set(ranks) for ranks in members]
    try:
        for process_set in filter(runtime.includes_me, sets):
            comm = runtime.communicator(process_set)
            mine = on_gpu(contribution("float32"))
            reduced = C.allreduce(comm, [mine], ["x"], _engine.OpOptions(SUM), 2**20)
            host = C.allreduce(comm, [mine.owner], ["x"], _engine.OpOptions(SUM), 2**20)
            assert_same((values(reduced), host))
            assert (comm.nccl is None) == (comm.size == 1)
    finally:
        for process_set in sets:
            keras_dist.remove_process_set(process_set)


def test_a_difference_is_found_before_nccl_is_called():
    comm, rank = runtime.communicator(), keras_dist.rank()
    before = len(launches())
    for shape, dtype, place in (
        ((2 + rank // (comm.size - 1),), "float32", on_gpu),
        ((2,), "float32" if rank else "float64", on_gpu),
        ((2,), "float32", np.asarray if rank else on_gpu),
    ):
        array = place(np.zeros(shape, dtype))
        with pytest.raises(errors.MismatchError, match="Expected"):
            C.allreduce(comm, [array], ["x"], _engine.OpOptions(SUM), 2**20)
    assert len(launches()) == before
    with pytest.raises(errors.ArgumentError, match="root_rank"):
        C.broadcast(comm, [on_gpu(np.zeros(2))], ["x"], comm.size)
    assert_same(both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20))


def test_ranks_that_have_joined_are_left_out():
    comm, rank = runtime.communicator(), keras_dist.rank()
    if rank:
        mine = on_gpu(np.full(3, 2.0 + rank, "float32"))
        (found,) = C.allreduce(comm, [mine], ["x"], _engine.OpOptions(SUM), 2**20)
        expected = sum(2.0 + other for other in range(1, comm.size))
        assert found.finish(0).tolist() == [expected] * 3
    keras_dist.join()


@pytest.mark.parametrize("bucket_nbytes", [16, 2**20])
def test_staging_through_pinned_memory(monkeypatch, bucket_nbytes):
    comm = runtime.communicator()
    monkeypatch.setattr(comm, "gpu_path", _engine.GpuPath(False, "a test"))
    arrays = [contribution("float32", (n,)) for n in (3, 0, 5, 7, 1000, 2)]
    before = len(launches())
    for _ in range(3):
        for op in (AVERAGE, MAX):
            assert_same(both_ways(C.allreduce, arrays, _engine.OpOptions(op), bucket_nbytes))
    assert_same(both_ways(C.broadcast, arrays, 0))
    assert_same(both_ways(C.grouped_allgather, arrays))
    assert_same(both_ways(C.reducescatter, arrays, _engine.OpOptions()))
    assert len(launches()) == before


def test_work_that_writes_an_array_comes_first():
    gpu = _gpu.load_runtime()
    comm, stream = runtime.communicator(), gpu.new_stream()
    for turn in range(20):
        later = np.full(1000, float(turn), "float32")
        mine = np.zeros(1000, "float32")
        gpu.copy(mine.ctypes.data, later.ctypes.data, mine.nbytes, stream)
        array = on_gpu(mine)
        array.written = gpu.event(stream)
        (found,) = C.allreduce(comm, [array], ["x"], _engine.OpOptions(), 2**20)
        assert (found.finish(0) == turn).all()


def test_a_queued_bucket():
    comm = runtime.communicator()
    specs = [((3,), np.dtype("float32")), ((4,), np.dtype("float32"))]
    fused = _engine.FusedAllreduce(
        comm, ["a", "b"], specs, _engine.OpOptions(SUM), _engine.PlanOptions(12)
    )
    arrays = [on_gpu(np.full(*spec)) for spec in (((3,), 1, "float32"), ((4,), 2, "float32"))]
    for array in arrays:
        array.prepare()
    handles = [fused.queue_bucket(number, [array]) for number, array in enumerate(arrays)]
    for number, handle in enumerate(handles):
        (result,) = handle.wait()
        assert (result.finish(0) == comm.size * (number + 1)).all()


def test_the_job_ends_its_communicator_and_makes_another():
    if runtime.communicator().nccl is None:
        both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20)
    before = runtime.communicator().nccl
    keras_dist.shutdown()
    keras_dist.init()
    assert runtime.communicator().nccl is None
    assert_same(both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20))
    assert runtime.communicator().nccl is not before


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_reduces_gradients_where_they_are(monkeypatch, jit_compile):
    import keras

    if keras.backend.backend() == "torch" and jit_compile:
        pytest.skip("torch.compile runs no other reduction")

    def copy(*args):
        raise AssertionError("an array has left the GPU")

    monkeypatch.setattr(_gpu.Runtime, "copy", copy)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8), keras.layers.ReLU(), keras.layers.Dense(1)]
    if keras.backend.backend() != "tensorflow" or not jit_compile:
        layers.insert(1, keras_dist.layers.SyncBatchNormalization())
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(
        keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)),
        loss="mse",
        jit_compile=jit_compile,
    )
    random = np.random.default_rng(keras_dist.rank())
    x, y = random.normal(size=(12, 4)).astype("f4"), random.normal(size=(12, 1)).astype("f4")
    before = len(launches())
    model.fit(x, y, batch_size=4, verbose=0, callbacks=keras_dist.callbacks())
    assert len(launches()) >= before + 3
    keras_dist.verify_replicas(model)


# --- Errors of one rank between the agreement and the launch


def fails_on_one(monkeypatch, owner, name, error):
    """Makes a function raise an error on the last rank; returns how to end that."""

    def fail(*args, **kwargs):
        raise error

    if keras_dist.rank() == keras_dist.size() - 1:
        monkeypatch.setattr(owner, name, fail)


def assert_all_raise_and_continue(monkeypatch, operation, text):
    last = keras_dist.size() - 1
    where = rf"\[rank {last} of {keras_dist.size()}\] Expected every rank to {text}"
    with pytest.raises(errors.RankError, match=where) as told:
        operation()
    assert told.value.rank == last
    assert isinstance(told.value.__cause__, Exception) == (keras_dist.rank() == last)
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


@pytest.mark.parametrize("name", ["allreduce", "allgather", "broadcast", "reducescatter"])
def test_no_memory_for_a_result_on_one_rank(monkeypatch, name):
    fails_on_one(monkeypatch, _gpu.DeviceArray, "empty", MemoryError("no memory for a result"))
    mine = on_gpu(np.ones((4, 2), "float32"))
    text = rf"launch {name}\('x'\)\. .*MemoryError: no memory for a result"
    assert_all_raise_and_continue(monkeypatch, lambda: operations()[name](mine), text)


@pytest.mark.parametrize("call", ["start", "allreduce", "end", "new_factor", "init", "unique_id"])
def test_an_error_of_nccl_on_one_rank(monkeypatch, call):
    comm = runtime.communicator()
    if call in ("init", "unique_id") and comm.nccl is not None:
        comm.nccl.close()
        comm.nccl = None
    if call == "unique_id" and keras_dist.rank() == 0:
        # The first rank makes the id.
        monkeypatch.setattr(_gpu.Nccl, call, lambda _: (_ for _ in ()).throw(_gpu.NcclError("no")))
    elif call != "unique_id":
        fails_on_one(monkeypatch, _gpu.Nccl, call, _gpu.NcclError("a code of NCCL"))
    mine = on_gpu(np.ones((4, 2), "float32"))
    if call == "unique_id":
        with pytest.raises(errors.RankError, match="NcclError: no"):
            operations()["allreduce"](mine)
        monkeypatch.undo()
        assert_same(both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20))
        return
    text = r"launch allreduce\('x'\)\. .*NcclError: a code of NCCL"
    assert_all_raise_and_continue(monkeypatch, lambda: operations()["allreduce"](mine), text)


def test_a_failed_launch_in_a_process_set(monkeypatch):
    size = keras_dist.size()
    if size == 2:
        pytest.skip("no two of two ranks are a set of their own")
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
    comm = runtime.communicator()
    path = comm.gpu_path
    comm.gpu_path = _engine.GpuPath(False, "a test")
    try:
        for name in ("allreduce", "broadcast"):
            fails_on_one(monkeypatch, _gpu.Runtime, "pinned", MemoryError("nothing to pin"))
            mine = on_gpu(np.ones((4, 2), "float32"))
            text = rf"prepare {name}\. .*MemoryError: nothing to pin"
            with pytest.raises(errors.RankError, match=text):
                operations()[name](mine)
            monkeypatch.undo()
    finally:
        comm.gpu_path = path
    assert_same(both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20))


# --- Buckets of TensorFlow on their way at once


def trained(monkeypatch, bucket_nbytes):
    """Returns the weights after training on TensorFlow, and the order of launches and results."""
    import keras

    from keras_dist._engine import FusedAllreduce
    from keras_dist.ops import gradient_plans

    order = []
    queue = FusedAllreduce.queue_bucket

    def queue_bucket(self, number, *args):
        order.append(("started", number))
        handle = queue(self, number, *args)
        wait = handle.wait
        handle.wait = lambda: order.append(("awaited", number)) or wait()
        return handle

    monkeypatch.setattr(FusedAllreduce, "queue_bucket", queue_bucket)
    monkeypatch.setattr(gradient_plans, "bucket_nbytes", lambda *_: bucket_nbytes)
    monkeypatch.setattr(gradient_plans, "overlaps", lambda _: False)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16), keras.layers.ReLU(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, loss="mse", jit_compile=False)
    random = np.random.default_rng(keras_dist.rank())
    x, y = random.normal(size=(12, 4)).astype("f4"), random.normal(size=(12, 1)).astype("f4")
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=keras_dist.callbacks())
    monkeypatch.undo()
    return [weight.tobytes() for weight in model.get_weights()], order


@pytest.mark.parametrize("path", ["NCCL", "pinned"])
def test_tensorflow_starts_all_buckets_before_it_waits(monkeypatch, path):
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("torch queues from hooks, JAX starts all in one host call")
    comm = runtime.communicator()
    before = comm.gpu_path
    if path == "pinned":
        comm.gpu_path = _engine.GpuPath(False, "a test")
    try:
        together, no_order = trained(monkeypatch, 2**20)
        apart, order = trained(monkeypatch, 1)
    finally:
        comm.gpu_path = before
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
    monkeypatch.setattr(comm, "gpu_path", _engine.GpuPath(False, "a test"))
    arrays = [contribution("float32", (n,)) for n in (3, 500, 1000)]
    for nbytes in (16, 2**20):
        assert_same(both_ways(C.allreduce, arrays, _engine.OpOptions(), nbytes))
    assert_same(both_ways(C.broadcast, arrays, 0))
    assert_same(both_ways(C.grouped_allgather, arrays))
    assert_same(both_ways(C.reducescatter, arrays, _engine.OpOptions()))
    rows, numbers = contribution("float32", (4, 3)), np.arange(4)
    C.reduce_slices(comm, on_gpu(rows), on_gpu(numbers), "table", _engine.OpOptions(SUM))

    assert len(copies) > 20
    assert set(copies) == {(True, False), (False, True)}
