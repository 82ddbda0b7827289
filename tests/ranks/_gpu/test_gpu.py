"""Arrays in GPU memory, over a test double of NCCL and CUDA's runtime; see `gpu_double`."""

import dataclasses
import importlib
import threading
import time

import keras
import ml_dtypes
import numpy as np
import pytest
from gpu_arrays import JOINER, assert_same, both_ways, contribution, launches, on_gpu, values

import keras_dist
from keras_dist import _engine, _gpu, errors, runtime
from keras_dist._engine.collectives import device_buckets
from keras_dist.ops import gradient_plans
from keras_dist.training import replicas

pytestmark = [
    pytest.mark.jobs("double-torch-2"),
    pytest.mark.skipif(not _gpu.counts_host_memory(), reason="without a GPU or its test double"),
    pytest.mark.usefixtures("ranks"),
]

BACKEND = keras.backend.backend()
of_jax = pytest.mark.skipif(BACKEND != "jax", reason="of programs that JAX compiles")
C = _engine.collectives
AVERAGE, SUM, MIN, MAX, PRODUCT, _ = _engine.ReduceOp
DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "int64", "uint8"]


@pytest.fixture
def ranks():
    if keras_dist.size() == 1:
        pytest.skip("one rank reduces nothing")


def check(operation, arrays, *args, launched=None):
    """Compares both ways of an operation, and the number of its launches."""
    before = len(launches())
    assert_same(both_ways(operation, arrays, *args))
    assert launched in (None, len(launches()) - before)


@pytest.mark.jobs("double-torch-3")
def test_results_have_the_bits_of_the_host_and_few_launches():
    size, rank = keras_dist.size(), keras_dist.rank()
    numbers, truth_values = [contribution(dtype) for dtype in DTYPES], contribution("bool")
    for op in (AVERAGE, SUM, MIN, MAX, PRODUCT):
        check(C.allreduce, numbers, _engine.OpOptions(op), 2**20)
    for op in (MIN, MAX, PRODUCT):
        check(C.allreduce, [truth_values], _engine.OpOptions(op), 2**20)
    floats = [contribution(dtype) for dtype in ("float32", "float16", ml_dtypes.bfloat16)]
    check(C.allreduce, floats, _engine.OpOptions(SUM, prescale=0.5, postscale=0.25), 2**20)
    # A third is not exact in these dtypes.
    check(C.allreduce, floats[1:], _engine.OpOptions(SUM, postscale=1 / 3), 2**20, launched=0)
    bucket = [contribution("float32", (n,)) for n in (3, 0, 5, 7)]
    check(C.allreduce, bucket, _engine.OpOptions(), 2**20, launched=1)
    for root in range(size):
        check(C.broadcast, [*numbers, truth_values], root)
    rows = [contribution("float32", (rank, 3)), contribution("int64", (2,))]
    check(C.grouped_allgather, rows, launched=1)
    rows = [contribution("float32", (2 * size + 1, 3)), contribution("float64", (1,))]
    for op in (SUM, AVERAGE):
        check(C.reducescatter, rows, _engine.OpOptions(op))


def test_rows_of_a_dtype_without_a_sum_are_refused_as_on_the_host():
    truth_values = np.ones(2 * keras_dist.size(), np.bool_)
    for rows in (truth_values, on_gpu(truth_values)):
        with pytest.raises(errors.ArgumentTypeError, match=r"a dtype that sum is defined for"):
            C.reducescatter(runtime.communicator(), [rows], ["x"], _engine.OpOptions(SUM))


def test_named_rows_match_in_any_order():
    comm, found = runtime.communicator(), {}
    values, indices = np.ones((2, 3), np.float32), np.array([0, 2])

    def reduce(name, after=0.0):
        time.sleep(after)
        options = _engine.OpOptions(SUM, key=name)
        rows = on_gpu(values), on_gpu(indices)
        found[name] = C.reduce_slices(comm, *rows, name, options)[0].finish(None)

    if keras_dist.rank() == 0:
        thread = threading.Thread(target=reduce, args=("b", 0.3), daemon=True)
        thread.start()
        reduce("a")
        thread.join()
    else:
        reduce("b")
        reduce("a")
    for rows in found.values():
        assert (rows == 1).all() and len(rows) == 2 * keras_dist.size()


@pytest.fixture
def pinned(monkeypatch):
    """Sends what is in GPU memory through pinned memory of the host."""
    monkeypatch.setattr(runtime.communicator(), "gpu_path", _engine.GpuPath(False, "a test"))


@pytest.fixture
def pieces(monkeypatch, pinned):
    """Stages in pieces of 400 bytes."""
    monkeypatch.setattr(device_buckets, "PIECE_NBYTES", 400)


def test_arrays_that_the_framework_joins_are_not_copied_by_the_engine(monkeypatch):
    def copy(*args):
        raise AssertionError("the engine copies")

    monkeypatch.setattr(_gpu.Runtime, "copy", copy)
    arrays = [contribution("float32", (n, 3)) for n in (3, 0, 5, 7)]
    before = len(launches())
    comm, names = runtime.communicator(), list("abcd")
    given = [on_gpu(array, JOINER) for array in arrays]
    here = values(C.allreduce(comm, given, names, _engine.OpOptions(SUM), 2**20))
    assert_same((here, C.allreduce(comm, arrays, names, _engine.OpOptions(SUM), 2**20)))
    assert launches()[before:] == [["ncclAllReduce"]]
    assert_same((values(given), arrays))


def test_the_ranks_meet_twice_for_all_buckets():
    comm, count = runtime.communicator(), C.rendezvous_count
    arrays = [contribution("float32", (n,)) for n in (3, 5, 7, 9, 4)]
    both_ways(C.allreduce, arrays, _engine.OpOptions(SUM), 16)
    before, met = len(launches()), count()
    given = [on_gpu(array) for array in arrays]
    found = C.allreduce(comm, given, list("abcde"), _engine.OpOptions(SUM), 16)
    assert launches()[before:] == [["ncclAllReduce"]] * 5
    assert count() - met == 2
    assert_same(
        (values(found), C.allreduce(comm, arrays, list("abcde"), _engine.OpOptions(SUM), 16))
    )


@pytest.mark.jobs("double-torch-3")
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


def test_a_set_of_one_rank_calls_no_nccl():
    alone = keras_dist.add_process_set([keras_dist.size() - 1])
    if alone.included():
        comm, mine = runtime.communicator(alone), contribution("float32")
        found = C.allreduce(comm, [on_gpu(mine)], ["x"], _engine.OpOptions(SUM), 2**20)
        assert_same((values(found), [mine]))
        assert comm.nccl is None
    keras_dist.remove_process_set(alone)


@pytest.mark.jobs("double-torch-3")
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


@pytest.mark.parametrize("joiner", [None, JOINER])
def test_a_large_bucket_is_staged_in_pieces_that_overlap(pieces, monkeypatch, joiner):
    comm, order = runtime.communicator(), []
    down, up, reduce = _gpu.Staging.down, _gpu.Staging.up, device_buckets.HostPieces.reduce
    section, sections = _gpu.DeviceArray.section, []

    def recorded(what, function):
        return lambda *args: order.append(what) or function(*args)

    monkeypatch.setattr(_gpu.Staging, "down", recorded("down", down))
    monkeypatch.setattr(_gpu.Staging, "up", recorded("up", up))
    monkeypatch.setattr(device_buckets.HostPieces, "reduce", recorded("reduce", reduce))

    def counted(*args):
        sections.append(args)
        return section(*args)

    monkeypatch.setattr(_gpu.DeviceArray, "section", counted)
    lengths = (301,) if joiner is None else (100, 201)
    arrays, names = [contribution("float32", (n,)) for n in lengths], ["a", "b"][: len(lengths)]
    for options in (_engine.OpOptions(AVERAGE, prescale=0.5), _engine.OpOptions(MAX)):
        order.clear()
        given = [on_gpu(array, joiner) for array in arrays]
        found = C.allreduce(comm, given, names, options, 2**20)
        turn = ["down", "reduce", "up"]
        assert order == ["down", *turn, *turn, *turn, "reduce", "up"]
        assert len(sections) == 2 * 4  # of what is reduced, and of the results
        sections.clear()
        assert_same((values(found), C.allreduce(comm, arrays, names, options, 2**20)))
    if comm.size in (2, 4):  # of whole arrays
        adasum = _engine.OpOptions(_engine.ReduceOp.ADASUM)
        assert_same(both_ways(C.allreduce, arrays, adasum, 2**20))


# Large pieces need new memory, for which the ranks meet as well.
@pytest.mark.parametrize("count", [250, 350_000])
def test_gradients_that_a_rank_lacks_after_a_bucket_was_reduced_in_pieces(
    pieces, monkeypatch, count
):
    comm, names, form = runtime.communicator(), ("a", "b"), ("float32", None)
    brought = _engine.GradientSet(names, names, (form, form), adapts=True)
    specs = [((n,), np.dtype("float32")) for n in (150, count)]
    options, plan = _engine.OpOptions(SUM, gradients=brought), _engine.BucketOptions(16)
    fused = _engine.FusedAllreduce(comm, names, specs, options, plan)
    mine = [np.full(*spec[:1], number + 1, "float32") for number, spec in enumerate(specs)]
    for _ in range(2):
        fused.reduce_bucket(0, [on_gpu(mine[0])])
        monkeypatch.setattr(device_buckets, "PIECE_NBYTES", 2 * count)
        if comm.rank == comm.size - 1:
            fewer = dataclasses.replace(brought, forms=(form, None))
            assert C.compare_gradients(comm, fewer, "") == brought.forms
        else:
            with pytest.raises(_engine.UnlikeGradients):
                fused.reduce_bucket(1, [on_gpu(mine[1])])
        for number, array in enumerate(mine):
            (found,) = fused.reduce_bucket(number, [on_gpu(array)])
            assert (found.finish(0) == comm.size * (number + 1)).all()


def test_a_table_in_gpu_memory_is_reduced_whole(pieces):
    comm, table = runtime.communicator(), np.zeros((90, 4), "float32")
    table[7] = comm.rank + 1
    arrays, names = [*np.ones((5, 3), "float32"), table], list("abcdef")
    specs = [(array.shape, array.dtype) for array in arrays]
    options, plan = _engine.OpOptions(SUM), _engine.BucketOptions(2**20, tables=[5])
    fused = _engine.FusedAllreduce(comm, names, specs, options, plan)
    found = values(fused([on_gpu(array) for array in arrays]))  # the table in four pieces
    assert_same((found, C.allreduce(comm, arrays, names, options, 2**20)))


def test_arrays_of_other_shapes_differ_in_pieces_too(pieces):
    comm = runtime.communicator()
    shape = (100, 3) if comm.rank == 0 else (3, 100)
    with pytest.raises(errors.MismatchError, match=r"'x' with shape \(100, 3\)"):
        C.allreduce(comm, [on_gpu(np.ones(shape))], ["x"], _engine.OpOptions(SUM), 2**20)


def test_pieces_of_a_reduction_that_has_failed_are_not_used_again(pieces, monkeypatch):
    def fail(*_):
        raise RuntimeError("a failure on all ranks")

    comm, spec = runtime.communicator(), ((300,), np.dtype("float32"))
    options, plan = _engine.OpOptions(SUM), _engine.BucketOptions(2**20)
    fused = _engine.FusedAllreduce(comm, ["a"], [spec], options, plan)
    with monkeypatch.context() as patched:
        patched.setattr(device_buckets.HostPieces, "reduce", fail)
        with pytest.raises(RuntimeError, match="a failure"):
            fused.reduce_bucket(0, [on_gpu(np.full(*spec[:1], 5, "float32"))])
    (found,) = fused.reduce_bucket(0, [on_gpu(np.ones(*spec[:1], "float32"))])
    assert (found.finish(0) == comm.size).all()


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


def test_pinned_memory_is_used_again_after_the_copies_into_it():
    staging = _gpu.Staging(_gpu.load_runtime())
    given_up = staging.down([on_gpu(np.ones(10))]).filled
    staging.down([on_gpu(np.ones(10))])
    staging.down([on_gpu(np.ones(10_000))])
    assert given_up.is_reached()


def test_the_job_ends_its_communicator_and_makes_another():
    if runtime.communicator().nccl is None:
        both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20)
    before = runtime.communicator().nccl
    keras_dist.shutdown()
    keras_dist.init()
    assert runtime.communicator().nccl is None
    assert_same(both_ways(C.allreduce, [contribution("float32")], _engine.OpOptions(), 2**20))
    assert runtime.communicator().nccl is not before


@pytest.mark.jobs("double")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_all_gradients_of_a_step_are_one_operation(jit_compile):
    if BACKEND == "torch" and jit_compile:
        pytest.skip("torch.compile runs no other reduction")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(n, "relu") for n in (3, 5, 7, 4)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    x, y = np.ones((4, 4), "f4"), np.ones((4, 1), "f4")
    runtime.communicator().meets_once = True  # tests before this one may have abandoned launches
    for _ in range(2):
        model.train_on_batch(x, y)
    before, met = len(launches()), C.rendezvous_count()
    for _ in range(3):
        model.train_on_batch(x, y)
    # Outside of `fit` batches may differ in size: what the loss is divided by travels on the host,
    # except beside a program of XLA on TensorFlow, where the rows are another operation.
    with_rows = jit_compile and BACKEND == "tensorflow"
    assert launches()[before:] == [["ncclAllReduce"]] * (2 if with_rows else 1) * 3
    if BACKEND == "jax":
        assert C.rendezvous_count() - met == 3 * 3  # one for the gradients
    keras_dist.verify_replicas(model)


@pytest.mark.jobs("double")
def test_the_state_of_a_model_is_broadcast_in_gpu_memory(monkeypatch):
    def copy(*_):
        raise AssertionError("the engine copies to the host")

    comm = runtime.communicator()
    keras.utils.set_random_seed(keras_dist.rank())
    layers = [keras.layers.Dense(4, dtype="bfloat16"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dropout(0.5)])
    model.compile(keras.optimizers.Adam(), loss="mse")
    model.optimizer.build(model.trainable_variables)
    count = len(replicas.shared_state(model))
    monkeypatch.setattr(_gpu.DeviceArray, "to_host", copy)
    for most, parts in ((2**20, 1), (1, count)):
        monkeypatch.setattr(replicas, "MOST_NBYTES", most)
        for weight in model.trainable_variables:
            weight.assign(keras.random.normal(weight.shape, dtype=weight.dtype))
        before = len(launches())
        replicas.broadcast_state(model, comm.size - 1)
        mine = launches()[before:]
        for weight in model.trainable_variables:  # at once, while the other ranks may still receive
            weight.assign(2 * weight)
        assert len(mine) == parts
        assert [name for launch in mine for name in launch] == ["ncclBroadcast"] * count
        keras_dist.verify_replicas(model)


def trained_in_passes(optimizer):
    """Returns a model after two updates, each of two accumulated passes."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer.gradient_accumulation_steps = 2
    model.compile(keras_dist.DistributedOptimizer(optimizer), loss="mse")
    x = np.random.default_rng(keras_dist.rank()).normal(size=(4, 4)).astype("f4")
    for _ in range(4):
        model.train_on_batch(x, x[:, :1])
    return model


@of_jax
@pytest.mark.jobs("double-jax-2")
@pytest.mark.parametrize("name", ["AdamW", "LARS"])
def test_replicas_are_equal_where_xla_chooses_other_kernels_on_a_rank(monkeypatch, name):
    from keras_dist._backends import jax_split

    compile_one = jax_split._compiled

    def compile_on_this_rank(jaxpr, free, options):
        program = compile_one(jaxpr, free, options)
        if options is not None:
            assert options == {"xla_gpu_autotune_level": 0}
            return program
        factor = 1 + 1e-5 * keras_dist.rank()  # as if sums had another order
        return lambda *given: [
            value * factor if value.dtype == "float32" else value for value in program(*given)
        ]

    monkeypatch.setattr(jax_split, "_compiled", compile_on_this_rank)
    optimizers = {**vars(keras.optimizers), "LARS": keras_dist.optimizers.LARS}
    model = trained_in_passes(optimizers[name](0.01, global_clipnorm=0.5))
    keras_dist.verify_replicas(model)


@of_jax
@pytest.mark.jobs("double-jax-2")
def test_arrays_of_jax_stay_as_they_are(monkeypatch):
    from keras_dist._backends import jax_devices as backend

    given, to_array = [], backend.to_array

    def copied(array, *options):
        given.append((array, np.array(array)))
        return to_array(array, *options)

    monkeypatch.setattr(backend, "to_array", copied)
    model = trained_in_passes(keras.optimizers.AdamW(0.01, global_clipnorm=0.5))
    assert any(array.size > 25 for array, _ in given)  # the gradients, joined
    for array, copy in given:
        assert np.array_equal(array, copy)
    keras_dist.verify_replicas(model)


def torch_overlaps(monkeypatch, nbytes):
    """Lets reductions of small buckets overlap with backpropagation; returns torch and its face."""
    if BACKEND != "torch":
        pytest.skip("of torch alone")
    monkeypatch.setattr(gradient_plans, "bucket_nbytes", lambda *_: nbytes)
    monkeypatch.setattr(gradient_plans, "FIRST_NBYTES", 256)
    monkeypatch.setattr(gradient_plans, "overlaps", lambda _: True)
    return importlib.import_module("torch"), importlib.import_module("keras_dist.torch")


def test_a_step_of_torch_launches_few_operations(monkeypatch):
    nbytes, count = 2048, 20
    torch, hvd = torch_overlaps(monkeypatch, nbytes)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    weights = sum(p.numel() * 4 for p in model.parameters())
    for step in range(4):
        x = torch.full((2, 8), 1.0 + step + keras_dist.rank())
        optimizer.zero_grad()
        before = len(launches())
        model(x).sum().backward()
        optimizer.step()
        mine = len(launches()) - before
        assert 2 < mine <= -(-weights // nbytes) + 1
        gradients = [hvd.allgather(p.grad.reshape(1, -1)) for p in model.parameters()]
        assert all((gathered == gathered[0]).all() for gathered in gradients)
    # A step that all ranks begin anew, since a gradient was written to.
    optimizer.zero_grad()
    model(x).sum().backward()
    model[3].weight.grad.zero_()
    optimizer.step()
    assert not model[3].weight.grad.any()
    digests = keras_dist.allgather_object([p.sum().item() for p in model.parameters()])
    assert digests == digests[:1] * keras_dist.size()


def test_a_gradient_that_appears_after_the_first_launch_counts_on_all_ranks(monkeypatch):
    torch, hvd = torch_overlaps(monkeypatch, 512)
    extra, *layers = (torch.nn.Linear(8, 8) for _ in range(5))
    model = torch.nn.ModuleList([extra, *layers])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    last = keras_dist.size() - 1
    for step in range(4):
        outputs = torch.full((2, 8), 1.0 + keras_dist.rank())
        if step == 2 and keras_dist.rank() == last:
            outputs = extra(outputs)
        for layer in layers:
            outputs = layer(outputs)
        optimizer.zero_grad()
        before = extra.bias.detach().clone()
        outputs.sum().backward()
        mine = extra.bias.grad.clone() if extra.bias.grad is not None else torch.zeros(8)
        optimizer.step()
        everyone = hvd.allgather(mine.reshape(1, -1))
        expected = before - 0.01 * everyone.sum(0) / keras_dist.size()
        torch.testing.assert_close(extra.bias.detach(), expected)
        assert bool((extra.bias != before).any()) is (step == 2)
    digests = keras_dist.allgather_object([p.sum().item() for p in model.parameters()])
    assert digests == digests[:1] * keras_dist.size()


@pytest.mark.jobs("double")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_reduces_gradients_where_they_are(monkeypatch, jit_compile):
    if BACKEND == "torch" and jit_compile:
        pytest.skip("torch.compile runs no other reduction")

    def copy(*args):
        raise AssertionError("an array has left the GPU")

    monkeypatch.setattr(_gpu.Runtime, "copy", copy)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8), keras.layers.ReLU(), keras.layers.Dense(1)]
    if BACKEND != "tensorflow" or not jit_compile:
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
