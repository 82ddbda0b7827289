"""keras_dist.tensorflow: variables and graphs. See `test_faces` for its operations."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests the TensorFlow backend", allow_module_level=True)

import tensorflow as tf
from face_tensorflow import Halved
from tensorflow.python.autograph.impl import api as autograph

import keras_dist
import keras_dist.tensorflow as hvd
from keras_dist import _gpu, errors
from keras_dist._backends import tensorflow_host
from keras_dist.tensorflow import reduce_ops

pytestmark = pytest.mark.jobs("tensorflow-2")

RANKS = range(hvd.size())
SIZE, RANK = hvd.size(), hvd.rank()
MEAN = (SIZE - 1) / 2  # mean of the ranks
DTYPES = "uint8 int8 uint16 int16 int32 int64 float16 bfloat16 float32 float64 complex64".split()


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
    if SIZE > 1:
        even = hvd.add_process_set(range(0, SIZE, 2))
        assert int(hvd.size_op(even.process_set_id)) == len(even.ranks)
        assert int(hvd.process_set_included_op(even.process_set_id)) == even.included()
        assert hvd.remove_process_set(even)
    assert hvd.mpi_built() and hvd.mpi_enabled() and not hvd.gloo_enabled()
    assert (hvd.cuda_built(), hvd.gloo_built()) == (False, False)
    assert (hvd.nccl_built() == 22304) == _gpu.counts_host_memory()


# --- Values


FLOATS = [((32,), "float32"), ((3, 16), "float32")]
LAYOUTS = {
    "full cache lines": FLOATS * 2,
    "some that are not": [*FLOATS, ((3,), "float32"), *FLOATS, ((), "int64"), ((8,), "int64")],
    "empty ones between": [*FLOATS, ((0, 4), "float32"), *FLOATS],
    "dtypes in turn": [((64,), dtype) for dtype in (*DTYPES, "float8_e5m2")] * 2,
    "several buckets": [((2**14,), "float32")] * 5,
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
    if layout == "several buckets":
        monkeypatch.setattr(reduce_ops, "bucket_nbytes", lambda: 2**17)

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


@pytest.mark.parametrize("name", ["allreduce", "allgather", "alltoall", "reducescatter"])
def test_a_graph_for_tensors_of_unknown_rank(name):
    operation = getattr(hvd, name)
    given = tf.ones((hvd.size(), 3))
    graph = tf.function(operation, input_signature=[tf.TensorSpec(None)], autograph=False)
    np.testing.assert_array_equal(graph(given), operation(given))


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


def rows(dtype="float32"):
    """Returns `IndexedSlices` of 5 rows: row 1 twice and a row that differs between ranks."""
    values = tf.cast(tf.fill([3, 2], RANK + 1), dtype)
    indices = tf.constant([1, 2 + RANK % 3, 1], tf.int64)
    return tf.IndexedSlices(values, indices, dense_shape=tf.constant([5, 2], tf.int64))


def test_indexed_slices_in_a_group_and_with_wrong_options():
    def both():
        sparse, plain = hvd.grouped_allreduce([rows(), rank_tensor()])
        return tf.convert_to_tensor(sparse), hvd.allreduce(tf.convert_to_tensor(rows())), plain

    sparse, dense, plain = in_both(both)
    np.testing.assert_allclose(sparse, dense, rtol=1e-6)
    np.testing.assert_allclose(plain, MEAN + 1)
    wrong = [{"op": op} for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum)]
    for how in (*wrong, {"prescale_factor": 2.0}, {"postscale_factor": 2.0}):
        with pytest.raises(NotImplementedError, match=r"^\[rank .* Expected op .*sparse_as_dense"):
            hvd.allreduce(rows(), **how)
        with pytest.raises(NotImplementedError, match="sparse_as_dense"):
            hvd.grouped_allreduce([rank_tensor(), rows()], **how)


def test_broadcast_in_place_from_every_root():
    variables = [tf.Variable(rank_tensor()), keras.Variable(np.full(2, RANK), dtype="int32")]
    for root in RANKS:
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


def test_collectives_of_horovod_on_objects_and_graphs():
    assert hvd.broadcast_object_fn(SIZE - 1)(RANK) == SIZE - 1
    tf.function(hvd.barrier)()
    with pytest.raises(RuntimeError, match=r"^\[rank .* Expected a list .*broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_autograph_converts_functions_of_the_script_only(monkeypatch):
    convert, converted = autograph._convert_actual, set()

    def recorded(function, *arguments):
        converted.add(function.__module__)
        return convert(function, *arguments)

    monkeypatch.setattr(autograph, "_convert_actual", recorded)
    many = (hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda x: hvd.broadcast(x, 0))
    tf.function(lambda x: [call(x) * keras_dist.size() for call in many])(tf.ones(SIZE))
    for way in (None, "global"):  # arrays, and a pipeline that is shuffled
        data = np.ones((4 * SIZE, 2)), tf.data.Dataset.range(4 * SIZE)
        for one in data:
            list(keras_dist.data.shard(one, batch_size=2, shuffle=way))
    assert converted == {__name__}


class Cautious(keras.optimizers.SGD):
    """An optimizer with a condition that AutoGraph converts."""

    def apply_gradients(self, grads_and_vars):
        [(gradient, variable)] = grads_and_vars
        scale = 1.0
        if tf.reduce_sum(gradient) > 0:
            scale = 0.5
        return super().apply_gradients([(scale * gradient, variable)])


def test_autograph_converts_the_optimizer_of_a_script():
    optimizer = keras_dist.DistributedOptimizer(Cautious(1.0))
    weight = keras.Variable([0.0])

    @tf.function
    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    step(tf.constant([1.0]))
    step(tf.constant([-1.0]))
    assert np.asarray(weight) == [0.5]


# --- Errors


def test_numpy_collectives_in_a_graph_name_the_remedy():
    for call in (keras_dist.allreduce, keras_dist.allgather, lambda x: keras_dist.broadcast(x, 0)):
        with pytest.raises(TypeError, match=r"use the functions of keras_dist\.tensorflow"):
            tf.function(call, autograph=False)(rank_tensor())
    with pytest.raises(Exception, match=r"use the functions of"):  # AutoGraph raises its own
        tf.function(keras_dist.allreduce)(rank_tensor())
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == SIZE


def test_xla_names_the_operation_it_cannot_compile():
    with pytest.raises(tf.errors.InvalidArgumentError, match="keras_dist_calls_the_host"):
        tf.function(lambda x: hvd.allreduce(x) + 1, jit_compile=True)(tf.ones(2))


def test_sync_batch_normalization_is_that_of_keras_dist_and_not_fused():
    assert isinstance(hvd.SyncBatchNormalization(), keras_dist.layers.SyncBatchNormalization)
    for fused in (True, None):
        with pytest.raises(ValueError, match="fused to be False"):
            hvd.SyncBatchNormalization(fused=fused)


def test_compressions_of_keras_dist_are_accepted():
    for compression in (hvd.Compression.fp16, keras_dist.Compression.fp16, "fp16", None):
        assert np.all(hvd.allreduce(rank_tensor(), compression=compression).numpy() == MEAN + 1)
    assert np.all(keras_dist.allreduce(rank_tensor(), compression=hvd.Compression.fp16) == MEAN + 1)
    sgd = keras.optimizers.SGD()
    keras_dist.DistributedOptimizer(sgd, compression=hvd.Compression.bf16)
    with pytest.raises(errors.ArgumentTypeError, match="an instance of keras_dist"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=Halved)


def test_operations_of_a_loop_follow_those_in_front_of_it():
    """The first reduction, of a long computation, is not a part of the loop's condition."""
    factor, first = tf.Variable(1.0), tf.constant(1.0 + hvd.rank())
    total, size = sum(range(1, hvd.size() + 1)), hvd.size()

    def long(x):
        for _ in tf.range(3000 * (hvd.rank() + 1) * (hvd.rank() % 2)):
            x = tf.sin(x) + x - tf.sin(x)
        return x

    def is_small():
        factor.assign(factor * 2)
        return hvd.allreduce(factor, op=hvd.Sum) < 50.0 * size

    @tf.function
    def run(x):
        in_front = hvd.allreduce(long(x), op=hvd.Sum)
        count = tf.constant(0)
        while is_small():
            count += 1
        return in_front, count, hvd.allreduce(x, op=hvd.Sum)

    for _ in range(3):
        factor.assign(1.0)
        in_front, count, behind = run(first)
        np.testing.assert_allclose(in_front, total, rtol=1e-3)
        assert int(count) == 5
        np.testing.assert_allclose(behind, total)
