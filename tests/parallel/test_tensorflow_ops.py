"""keras_dist.tensorflow: collectives of tensors, eager and in a graph, with gradients."""

import threading

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests the TensorFlow backend", allow_module_level=True)

import tensorflow as tf

import keras_dist
import keras_dist.tensorflow as hvd
from keras_dist import _gpu, errors
from keras_dist._backends import tensorflow_host

pytestmark = pytest.mark.jobs("tensorflow-2", "tensorflow-1")

RANKS = range(hvd.size())
SIZE, RANK = hvd.size(), hvd.rank()
MEAN = (SIZE - 1) / 2  # mean of the ranks
DTYPES = "uint8 int8 uint16 int16 int32 int64 float16 bfloat16 float32 float64 complex64".split()
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")


def in_both(function, *arguments):
    """Returns the eager result of a function, after a check that a graph returns the same."""
    eager = function(*arguments)
    graph = tf.function(function)(*arguments)
    for one, other in zip(tf.nest.flatten(eager), tf.nest.flatten(graph), strict=True):
        np.testing.assert_array_equal(one, other)
    return eager


def rank_tensor(rows=2, dtype="float32", columns=3):
    """Returns a tensor filled with the rank plus one."""
    return tf.cast(tf.fill([rows, columns], RANK + 1), dtype)


def gradient_of(function, tensor, weights=None):
    """Returns the gradient of the (weighted) sum of the results, eagerly and in a graph."""

    def gradient(given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = function(given)
        return tape.gradient(result, given, output_gradients=weights)

    return in_both(gradient, tensor).numpy()


# --- Ranks


def test_rank_and_size_operations_equal_the_functions():
    def numbers():
        return [
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
        ]

    expected = [RANK, SIZE, hvd.local_rank(), hvd.local_size(), 1]
    assert [int(number) for number in in_both(numbers)] == expected
    with pytest.raises(ValueError, match="the id of a process set"):
        hvd.size_op(process_set_id=77)
    assert hvd.mpi_built() and hvd.mpi_enabled() and not hvd.gloo_enabled()
    assert (hvd.cuda_built(), hvd.gloo_built()) == (False, False)
    assert (hvd.nccl_built() == 22304) == _gpu.counts_host_memory()


# --- Values


def test_allreduce_of_every_dtype_with_every_op():
    expected = {
        hvd.Sum: sum(rank + 1 for rank in RANKS),
        hvd.Min: 1,
        hvd.Max: SIZE,
        hvd.Product: np.prod([rank + 1 for rank in RANKS]),
    }

    def reduced(op):
        tensors = [rank_tensor(dtype=dtype) for dtype in DTYPES]
        if op in (hvd.Min, hvd.Max):
            tensors.pop()  # complex numbers have no order
        return hvd.grouped_allreduce(tensors, op=op)

    for op, value in expected.items():
        for dtype, result in zip(DTYPES, in_both(reduced, op), strict=False):
            assert result.dtype == dtype and result.shape == (2, 3)
            assert np.all(result.numpy() == value), (op, dtype)
    averaged = hvd.allreduce(rank_tensor())
    np.testing.assert_allclose(averaged, MEAN + 1)
    assert int(hvd.allreduce(tf.constant(RANK + 1))) == int(MEAN + 1)  # truncated
    for dtype in (name for name in DTYPES if "int" in name):  # the sum overflows
        limits = tf.constant([tf.dtypes.as_dtype(dtype).min, tf.dtypes.as_dtype(dtype).max], dtype)
        np.testing.assert_array_equal(in_both(hvd.allreduce, limits), limits)
    assert not bool(hvd.allreduce(tf.constant(RANK > 0), op="min"))


def test_prescale_and_postscale_factors():
    def scaled():
        before = hvd.allreduce(rank_tensor(dtype="int32"), op=hvd.Sum, prescale_factor=1.7)
        after = hvd.allreduce(rank_tensor(dtype="float16"), op=hvd.Sum, postscale_factor=0.5)
        return before, after

    before, after = in_both(scaled)
    assert np.all(before.numpy() == sum(int(1.7 * (rank + 1)) for rank in RANKS))
    assert np.all(after.numpy() == SIZE * (MEAN + 1) / 2)


FLOATS = [((32,), "float32"), ((3, 16), "float32")]
LAYOUTS = {
    "full cache lines": FLOATS * 2,
    "some that are not": [*FLOATS, ((3,), "float32"), *FLOATS, ((), "int64"), ((8,), "int64")],
    "empty ones between": [*FLOATS, ((0, 4), "float32"), *FLOATS],
    "dtypes in turn": [((64,), dtype) for dtype in (*DTYPES, "float8_e5m2")] * 2,
    "more than a bucket": [((2**21,), "float32")] * 5,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_results_of_a_group_are_in_the_order_of_its_tensors(layout, factor, monkeypatch):
    copied = []
    join = tensorflow_host._join

    def joined(arrays):
        result = join(arrays)
        copied.append(result is not arrays[0] and not np.shares_memory(result, arrays[-1]))
        return result

    monkeypatch.setattr(tensorflow_host, "_join", joined)

    def numbers(number, shape, dtype):  # representable in every dtype
        counted = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + number) % 2
        return tf.cast(counted, "float32" if dtype == "float8_e5m2" else dtype)

    specs = [spec for spec in LAYOUTS[layout] if factor == 1 or spec[1] != "float8_e5m2"]
    given = [numbers(number, *spec) for number, spec in enumerate(specs)]

    def sums(*tensors):
        own = [tensor * tf.cast(RANK + 1, tensor.dtype) for tensor in tensors]
        own = [tf.cast(tensor, dtype) for tensor, (_, dtype) in zip(own, specs, strict=True)]
        return hvd.grouped_allreduce(own, op=hvd.Sum, postscale_factor=factor)

    for _ in range(2):
        for result, tensor, (_, dtype) in zip(in_both(sums, *given), given, specs, strict=True):
            expected = tensor * tf.cast(factor * sum(rank + 1 for rank in RANKS), tensor.dtype)
            assert result.dtype == dtype
            np.testing.assert_array_equal(tf.cast(result, tensor.dtype), expected)
    assert copied and not any(copied)


@pytest.mark.skipif(SIZE & (SIZE - 1), reason="Adasum needs a power of two ranks")
def test_adasum_of_a_group_in_a_graph():
    given = [tf.range(16.0 * number) + RANK for number in (1, 2)]
    results = in_both(lambda *tensors: hvd.grouped_allreduce(tensors, op=hvd.Adasum), *given)
    for result, tensor in zip(results, given, strict=True):
        np.testing.assert_array_equal(result, hvd.allreduce(tensor, op=hvd.Adasum))


@pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
def test_a_branch_of_a_graph_for_a_process_set():
    process_set = hvd.ProcessSet([0])
    hvd.add_process_set(process_set)

    @tf.function
    def step(x, is_included):
        def reduced():
            return hvd.grouped_allreduce([x, x], op=hvd.Sum, process_set=process_set)

        return tf.cond(is_included, reduced, lambda: [x, x])

    for result in step(tf.ones([16]), tf.constant(RANK == 0)):
        np.testing.assert_array_equal(result, np.ones(16, np.float32))
    hvd.remove_process_set(process_set)


def test_an_in_place_write_to_a_result_in_a_graph_changes_no_other():
    size = 40_000

    @tf.function
    def reuse():
        own = [tf.fill([size], float(number + RANK)) for number in range(4)]
        first = hvd.grouped_allreduce(own, op=hvd.Sum)
        doubled = [2.0 * one for one in first[1:3]]  # TensorFlow may compute it in place
        second = hvd.grouped_allreduce(doubled, op=hvd.Sum)
        return [first[0] + 1.0, first[3] + 1.0, *second]

    total = sum(RANKS)
    wanted = [
        total + 1,
        3 * SIZE + total + 1,
        2 * SIZE * (SIZE + total),
        2 * SIZE * (2 * SIZE + total),
    ]
    for _ in range(3):
        for result, value in zip(reuse(), wanted, strict=True):
            np.testing.assert_array_equal(result, np.full(size, value, np.float32))


def test_average_is_deprecated_and_excludes_op():
    with pytest.warns(DeprecationWarning, match="Average"):
        averaged = hvd.allreduce(tf.constant(float(RANK)), average=True)
    with pytest.warns(DeprecationWarning, match="Sum"):
        total = hvd.allreduce(tf.constant(float(RANK)), average=False)
    assert (float(averaged), float(total)) == (MEAN, MEAN * SIZE)
    with pytest.raises(ValueError, match="either op or average"):
        hvd.allreduce(tf.constant(1.0), average=True, op=hvd.Sum)


def rows(dtype="float32"):
    """Returns `IndexedSlices` of 5 rows: row 1 twice and a row that differs between ranks."""
    values = tf.cast(tf.fill([3, 2], RANK + 1), dtype)
    indices = tf.constant([1, 2 + RANK % 3, 1], tf.int64)
    return tf.IndexedSlices(values, indices, dense_shape=tf.constant([5, 2], tf.int64))


def test_indexed_slices_equal_the_dense_reduction():
    def both(op):
        sparse, plain = hvd.grouped_allreduce([rows(), rank_tensor()], op=op)
        alone = tf.convert_to_tensor(hvd.allreduce(rows(), op=op))
        dense = hvd.allreduce(tf.convert_to_tensor(rows()), op=op)
        return tf.convert_to_tensor(sparse), alone, dense, plain

    for op, times in ((hvd.Sum, SIZE), (hvd.Average, 1), ("Average", 1)):
        sparse, alone, dense, plain = in_both(both, op)
        np.testing.assert_allclose(sparse, dense, rtol=1e-6)
        np.testing.assert_allclose(alone, dense, rtol=1e-6)
        np.testing.assert_allclose(plain, (MEAN + 1) * times)
    wrong = [{"op": op} for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum)]
    for how in (*wrong, {"prescale_factor": 2.0}, {"postscale_factor": 2.0}):
        with pytest.raises(NotImplementedError, match="sparse_as_dense"):
            hvd.allreduce(rows(), **how)
        with pytest.raises(NotImplementedError, match="sparse_as_dense"):
            hvd.grouped_allreduce([rank_tensor(), rows()], **how)


def test_allgather_of_different_lengths_and_all_dtypes():
    def gathered():
        tensors = [rank_tensor(1 + RANK, dtype) for dtype in DTYPES]
        bools = hvd.allgather(tf.fill([1], RANK == 0))
        return *hvd.grouped_allgather(tensors), bools

    *results, bools = in_both(gathered)
    expected = np.repeat([rank + 1 for rank in RANKS], [rank + 1 for rank in RANKS])
    for dtype, result in zip(DTYPES, results, strict=True):
        assert result.dtype == dtype
        np.testing.assert_array_equal(result[:, 0].numpy().astype(complex), expected)
    np.testing.assert_array_equal(bools, [rank == 0 for rank in RANKS])


def test_broadcast_from_every_root_and_in_place():
    variables = [tf.Variable(rank_tensor()), keras.Variable(np.full(2, RANK), dtype="int32")]

    def sent(root):
        return hvd.broadcast(rank_tensor(dtype="bfloat16"), root), hvd.broadcast(
            tf.constant(RANK), root
        )

    for root in RANKS:
        values, number = in_both(sent, root)
        assert np.all(values.numpy() == root + 1) and int(number) == root
        variables[0].assign(rank_tensor())
        assert hvd.broadcast_(variables, root)[0] is variables[0]
        assert np.all(variables[0].numpy() == root + 1)
    assert np.all(np.asarray(variables[1]) == 0)


def test_broadcast_variables_of_a_model_sets_what_layers_derive_from_them():
    layer = keras.layers.Normalization()
    layer.adapt(np.array([[0.0], [2.0 + RANK]], "float32"))
    model = keras.Sequential([keras.Input((1,)), layer])
    hvd.broadcast_variables(model, root_rank=SIZE - 1)
    keras_dist.verify_replicas(model)
    assert float(layer.mean[0, 0]) == (2 + SIZE - 1) / 2


def test_broadcast_variables_skips_accumulated_gradients():
    variable = keras.Variable(np.full(3, RANK, "float32"))
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
    for _ in range(3):
        optimizer.apply_gradients([(tf.fill([3], RANK + 1.0), variable)])
    optimizer.momentums[0].assign([RANK] * 3)
    hvd.broadcast_variables([variable, *optimizer.variables], root_rank=0)
    np.testing.assert_array_equal(optimizer._accumulated_gradients[0], [RANK + 1] * 3)
    np.testing.assert_array_equal(optimizer.momentums[0], np.zeros(3))


def test_alltoall_with_and_without_splits():
    rows_of = tf.repeat(rank_tensor(1), SIZE * (RANK + 1), axis=0)

    def sent():
        some, received = hvd.alltoall(rows_of, splits=tf.fill([SIZE], RANK + 1))
        nothing, none = hvd.alltoall(rows_of, splits=[0] * SIZE)
        to_last = [0] * (SIZE - 1) + [1]
        last, came = hvd.alltoall(rows_of, splits=to_last)
        return some, received, hvd.alltoall(rows_of), nothing, none, last, came

    some, received, equal, nothing, none, last, came = in_both(sent)
    expected = np.repeat([rank + 1 for rank in RANKS], [rank + 1 for rank in RANKS])
    np.testing.assert_array_equal(some[:, 0], expected)
    np.testing.assert_array_equal(equal, some)
    np.testing.assert_array_equal(received, [rank + 1 for rank in RANKS])
    assert received.dtype == tf.int32
    assert nothing.shape == (0, 3) and not np.any(none)
    assert len(last) == (SIZE if RANK == SIZE - 1 else 0) and sum(came) == len(last)


def test_reducescatter_of_a_length_not_divisible_by_ranks():
    length = 2 * SIZE + SIZE // 2

    def scattered():
        tensors = [
            rank_tensor(length, dtype) for dtype in ("int32", "int64", "float16", "bfloat16")
        ]
        return *hvd.grouped_reducescatter(tensors, op=hvd.Sum), hvd.reducescatter(
            rank_tensor(length)
        )

    *sums, mean = in_both(scattered)
    for result in sums:
        assert len(result) == 2 + (RANK < SIZE // 2)
        assert np.all(result.numpy() == SIZE * (MEAN + 1))
    np.testing.assert_allclose(mean, MEAN + 1)


def test_object_collectives_and_barrier():
    assert hvd.broadcast_object({"rank": RANK}, name="state") == {"rank": 0}
    assert hvd.broadcast_object_fn(SIZE - 1)(RANK) == SIZE - 1
    assert hvd.allgather_object({RANK: "mine"}) == [{rank: "mine"} for rank in RANKS]
    hvd.barrier()
    tf.function(hvd.barrier)()
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_join_averages_over_ranks_with_data():
    values, sums = [], []
    for _ in range(1 + RANK):
        values.append(float(hvd.allreduce(tf.constant(RANK + 1.0))))
        sums.append(float(hvd.allreduce(tf.constant(2.0), op=hvd.Sum)))
    last = int(hvd.join())
    assert last == SIZE - 1  # the same on all ranks
    assert sums == [2.0 * (SIZE - step) for step in range(RANK + 1)]
    np.testing.assert_allclose(
        values, [np.mean(range(step + 1, SIZE + 1)) for step in range(RANK + 1)]
    )


@several
def test_collectives_on_a_process_set():
    ranks = list(range(0, SIZE, 2))
    even = hvd.add_process_set(ranks)
    number = even.process_set_id
    assert int(hvd.size_op(number)) == len(ranks)
    assert int(hvd.process_set_included_op(number)) == (RANK in ranks)
    if even.included():
        total = hvd.allreduce(tf.constant(RANK), op=hvd.Sum, process_set=even)
        assert int(total) == sum(ranks)
        assert hvd.allgather([RANK], process_set=even).numpy().tolist() == ranks
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="to be in the process set"):
            hvd.allreduce(tf.constant(RANK), process_set=even)
    assert hvd.remove_process_set(even)


# --- Gradients


def test_gradients_of_allreduce():
    weights = rank_tensor()  # weights: the rank plus one
    for op, expected in (
        ("Sum", SIZE * (MEAN + 1)),
        (hvd.Average, MEAN + 1),
        ("AVERAGE", MEAN + 1),
    ):
        found = gradient_of(lambda x, op=op: hvd.allreduce(x, op=op), rank_tensor(), weights)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    found = gradient_of(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1], rank_tensor())
    np.testing.assert_allclose(found, 2 * SIZE)
    found = gradient_of(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0),
        rank_tensor(),
    )
    np.testing.assert_allclose(found, 6 * SIZE)
    with pytest.raises(ValueError, match="Average or Sum in an allreduce"):
        gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max), rank_tensor())


# Each with the factor between Horovod's gradient and that of the sum of all ranks' losses.
SLOPES = {
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), 1),
    "average with factors": (lambda x: hvd.allreduce(x, None, "", "", None, None, 3.0, 0.5), 1),
    "grouped": (lambda x: tf.concat(hvd.grouped_allreduce([x, x**2], op=hvd.Sum), 0), 1),
    "alltoall": (lambda x: hvd.alltoall(x, [1] + [0] * (SIZE - 1))[0], 1),
    "alltoall equal": (hvd.alltoall, 1),
    "allgather": (hvd.allgather, 1 / SIZE),
    "grouped allgather": (lambda x: tf.concat(hvd.grouped_allgather([x, 2 * x]), 0), 1 / SIZE),
    "broadcast": (lambda x: hvd.broadcast(x, SIZE - 1), 1 / SIZE),
    "reducescatter": (hvd.reducescatter, SIZE),
    "grouped sum": (lambda x: tf.concat(hvd.grouped_reducescatter([x, x], op=hvd.Sum), 0), SIZE),
}


@pytest.mark.parametrize("name", SLOPES)
def test_gradients_against_finite_differences(name):
    operation, factor = SLOPES[name]

    def loss(x):
        result = tf.reshape(operation(x), [-1])
        return tf.reduce_sum(result**2 * tf.range(RANK + 1, RANK + 1 + len(result), dtype=x.dtype))

    x, step = np.arange(2.0 * SIZE).reshape(SIZE, 2) / 4 + RANK + 1, 1e-5
    given = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(given)
        value = loss(given)
    found = tape.gradient(value, given).numpy()
    for source in RANKS:  # perturb the value of each rank in turn
        direction = np.linspace(0.5, 1, x.size).reshape(x.shape) * (source == RANK)
        sides = loss(tf.constant(x + step * direction)), loss(tf.constant(x - step * direction))
        total = hvd.allreduce((sides[0] - sides[1]) / (2 * step), op=hvd.Sum)
        if source == RANK:
            np.testing.assert_allclose((found * direction).sum(), factor * total, rtol=1e-6)


def test_gradients_of_data_movement_equal_those_of_horovod():
    lengths = [rank + 1 for rank in RANKS]
    weights = tf.repeat(tf.constant(lengths, tf.float32), lengths)[:, None] * rank_tensor(1)
    found = gradient_of(hvd.allgather, rank_tensor(RANK + 1), weights)
    np.testing.assert_allclose(found, (RANK + 1) * (MEAN + 1))  # the average, of this rank's rows
    found = gradient_of(lambda x: hvd.broadcast(x, SIZE - 1), rank_tensor(), rank_tensor())
    np.testing.assert_allclose(found, (MEAN + 1) if RANK == SIZE - 1 else 0)
    splits = [RANK + 1] * SIZE
    found = gradient_of(  # weights are the receiver's; the last row is not sent
        lambda x: hvd.alltoall(x, splits=splits)[0] * (RANK + 1.0),
        rank_tensor(SIZE * (RANK + 1) + 1),
    )
    np.testing.assert_allclose(found[:-1, 0], np.repeat(lengths, RANK + 1))
    assert not np.any(found[-1])
    places = tf.range(RANK + 1, RANK + 1 + sum(lengths), dtype=tf.float32)[:, None]
    found = gradient_of(lambda x: hvd.alltoall(x) * places, rank_tensor(SIZE * (RANK + 1)))
    arrives = [to + 1 + sum(lengths[:RANK]) + i for to in RANKS for i in range(RANK + 1)]
    np.testing.assert_allclose(found[:, 0], arrives)
    for op, expected in ((hvd.Sum, SIZE), ("Sum", SIZE), ("SUM", SIZE), ("Average", 1)):
        found = gradient_of(lambda x, op=op: hvd.reducescatter(x, op=op), rank_tensor(2 * SIZE + 1))
        np.testing.assert_allclose(found, expected)


# --- Errors, after each of which the job continues


@several
@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce(tf.ones([RANK + 1])),
        lambda: hvd.allreduce(tf.ones([2, 3] if RANK else [3, 2])),
        lambda: hvd.allreduce(tf.ones(2, tf.float64 if RANK else tf.float32)),
        lambda: hvd.allreduce(tf.ones(2), op=hvd.Sum if RANK else hvd.Average),
        lambda: hvd.allreduce(tf.ones(2), op=hvd.Sum, prescale_factor=RANK + 1.0),
        lambda: hvd.allreduce(tf.ones(2), name=f"loss of {RANK}"),
        lambda: hvd.allgather(tf.ones([2, RANK + 1])),
        lambda: hvd.allgather(tf.ones(2, tf.float64 if RANK else tf.float32)),
        lambda: hvd.allgather(tf.ones([2, 1] if RANK else [2])),
        lambda: hvd.broadcast(tf.ones([RANK + 1]), 0),
        lambda: hvd.broadcast(tf.ones(2), min(RANK, 1)),
        lambda: hvd.broadcast(tf.ones(2, tf.float64 if RANK else tf.float32), 0),
        lambda: hvd.alltoall(tf.ones([SIZE], tf.float64 if RANK else tf.float32)),
        lambda: hvd.alltoall(tf.ones([SIZE, RANK + 1])),
        lambda: hvd.reducescatter(tf.ones([RANK + 1])),
        lambda: hvd.reducescatter(tf.ones(SIZE, tf.float64 if RANK else tf.float32)),
        lambda: hvd.broadcast_variables([tf.Variable(tf.ones(RANK + 1))], 0),
        lambda: hvd.allgather(tf.ones(2)) if RANK else hvd.allreduce(tf.ones(2)),
    ],
    ids=(
        "shape rank dtype op factor name rows gathered dimensions broadcast root sent alltoall "
        "columns scatter scattered variables kind"
    ).split(),
)
def test_a_mismatch_is_a_failed_precondition_on_every_rank(call):
    with pytest.raises(
        tf.errors.FailedPreconditionError, match=r"\[rank 1 of \d\] Expected"
    ) as info:
        call()
    assert isinstance(info.value, keras_dist.errors.MismatchError)
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == SIZE


@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.broadcast(tf.ones(2), SIZE),
        lambda: hvd.reducescatter(tf.constant(1.0)),
        lambda: hvd.allgather(tf.constant(1.0)),
        lambda: hvd.alltoall(tf.ones(SIZE), splits=[2] * SIZE),
        lambda: hvd.alltoall(tf.ones(SIZE + 1), splits=[1]) if SIZE > 1 else hvd.allgather(1.0),
        lambda: hvd.alltoall(tf.ones(SIZE + 1)) if SIZE > 1 else hvd.allgather(1.0),
        lambda: hvd.allreduce(tf.ones(2), op="median"),
    ],
    ids="root scatter gather splits number length op".split(),
)
def test_an_invalid_argument_is_an_invalid_argument_error(call):
    for form in (call, tf.function(call)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[rank \d of \d\] Expected"):
            form()
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == SIZE


def test_numpy_collectives_in_a_graph_name_the_remedy():
    for call in (keras_dist.allreduce, keras_dist.allgather, lambda x: keras_dist.broadcast(x, 0)):
        for kind, converts in ((TypeError, False), (Exception, True)):  # AutoGraph raises its own
            with pytest.raises(kind, match=r"use the functions of keras_dist\.tensorflow"):
                tf.function(call, autograph=converts)(rank_tensor())
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == SIZE


def test_named_operations_of_several_threads_match_in_any_order():
    results = {}

    def reduce(number):
        results[number] = hvd.allreduce(rank_tensor() * number, op=hvd.Sum, name=f"loss {number}")

    order = np.random.default_rng(RANK).permutation(6)
    threads = [threading.Thread(target=reduce, args=(int(number),)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        np.testing.assert_allclose(results[number], SIZE * (MEAN + 1) * number)


@several
def test_the_error_of_a_mismatch_in_a_graph_keeps_its_text():
    step = tf.function(lambda x: hvd.allreduce(x), reduce_retracing=True)
    with pytest.raises(tf.errors.OpError, match=r"\[rank 1 of \d\] Expected 'value' with shape"):
        step(tf.ones([RANK + 1]))
    assert float(step(tf.constant(1.0))) == 1


def test_xla_names_the_operation_it_cannot_compile():
    with pytest.raises(tf.errors.InvalidArgumentError, match="keras_dist_calls_the_host"):
        tf.function(lambda x: hvd.allreduce(x) + 1, jit_compile=True)(tf.ones(2))


# --- The layer


def test_sync_batch_normalization_equals_batch_normalization_of_the_global_batch():
    x = np.random.default_rng(0).standard_normal((4 * SIZE, 3)).astype("float32")
    ours, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    own = slice(4 * RANK, 4 * RANK + 4)
    result, expected = ours(x[own], training=True), plain(x, training=True)
    np.testing.assert_allclose(result, expected[own], atol=1e-5)
    np.testing.assert_allclose(ours.moving_mean, plain.moving_mean, atol=1e-6)
    np.testing.assert_allclose(ours.moving_variance, plain.moving_variance, atol=1e-6)
    for fused in (True, None):
        with pytest.raises(ValueError, match="fused to be False"):
            hvd.SyncBatchNormalization(fused=fused)


def test_compression_of_floats_and_integers():
    for dtype in ("float32", "float64", "int32", "float16"):
        result = hvd.allreduce(
            rank_tensor(dtype=dtype), op=hvd.Sum, compression=hvd.Compression.fp16
        )
        assert result.dtype == dtype and np.all(result.numpy() == SIZE * (MEAN + 1))


class Halved(hvd.Compressor):
    """A custom compression as in scripts of Horovod: static methods on tensors."""

    @staticmethod
    def compress(tensor):
        return tf.cast(tensor, tf.float16) / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tf.cast(tensor, ctx) * 2


@pytest.fixture(params=[False, True], ids=["eager", "graph"])
def traced(request):
    return tf.function if request.param else lambda function: function


def test_compression_of_tensors(traced):
    narrow = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}
    for name, dtype in narrow.items():
        compression = getattr(hvd.Compression, name)
        compress = traced(lambda one, c=compression: c.compress(one)[0])
        back = traced(lambda one, c=compression: c.decompress(*c.compress(one)))
        for given in (tf.constant([0.5, 2]), tf.constant([1.0], tf.float64), tf.constant([1, 2])):
            small, found = compress(given), back(given)
            assert small.dtype == (dtype if dtype and given.dtype.is_floating else given.dtype)
            assert found.dtype == given.dtype and np.all(found == given)
    assert hvd.Compression.fp16.compress(np.float32([1]))[0].dtype == tf.float16


def test_a_custom_compression_of_tensors(traced):
    expected = SIZE * (MEAN + 1)
    reduce = traced(lambda one: hvd.allreduce(one, op=hvd.Sum, compression=Halved))
    result = reduce(rank_tensor())
    assert result.dtype == tf.float32 and np.all(result.numpy() == expected)
    variable = tf.Variable(rank_tensor())

    @traced
    def gradient():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(variable * rank_tensor())
        return hvd.DistributedGradientTape(tape, compression=Halved).gradient(total, variable)

    assert gradient().dtype == tf.float32 and np.all(gradient().numpy() == MEAN + 1)


def test_compressions_of_keras_dist_are_accepted():
    for compression in (hvd.Compression.fp16, keras_dist.Compression.fp16, "fp16", None):
        assert np.all(hvd.allreduce(rank_tensor(), compression=compression).numpy() == MEAN + 1)
    assert np.all(keras_dist.allreduce(rank_tensor(), compression=hvd.Compression.fp16) == MEAN + 1)
    sgd = keras.optimizers.SGD()
    keras_dist.DistributedOptimizer(sgd, compression=hvd.Compression.bf16)
    with pytest.raises(errors.ArgumentTypeError, match="an instance of keras_dist"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=Halved)
