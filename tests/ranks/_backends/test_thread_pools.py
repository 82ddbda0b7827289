"""TensorFlow's thread pools: programs in which operations wait for the host do not deadlock."""

import threading

import keras
import numpy as np
import pytest
from mpi4py import MPI

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests the TensorFlow backend", allow_module_level=True)

import tensorflow as tf

import keras_dist
from keras_dist._backends.tensorflow_host import on_host

pytestmark = [pytest.mark.jobs("tensorflow-3"), pytest.mark.limit(60)]
world = MPI.COMM_WORLD


def averaged(tensor):
    """Returns the average over the ranks, by an operation that waits for them."""
    return on_host(lambda array: [keras_dist.allreduce(array)], [tensor], [tensor.shape])[0]


@tf.function
def nested(x):
    """A function that averages twice, once in a branch."""
    x = averaged(x)
    return tf.cond(tf.reduce_sum(x) > 0, lambda: averaged(x), lambda: x)


def numbers(count):
    """Returns a pipeline of a Python generator and of Python in a map."""

    def generate():
        yield from np.arange(1, count + 1, dtype=np.float32)

    spec = tf.TensorSpec((), tf.float32)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)

    def load(x):
        return tf.ensure_shape(tf.numpy_function(lambda x: x * 2, [x], tf.float32), ())

    return dataset.map(load, num_parallel_calls=4).prefetch(2)


def test_operations_that_wait_in_nested_functions_and_a_loop():
    @tf.function
    def step(x):
        for _ in tf.range(3):
            x = nested(x) + nested(x)
        return x

    start = tf.fill([4], float(world.rank))
    mean = (world.size - 1) / 2
    np.testing.assert_allclose(step(start), np.full(4, mean * 8))


def test_pipelines_run_python_while_operations_wait():
    @tf.function
    def step(iterator):
        return nested(next(iterator) * (world.rank + 1))

    iterator = iter(numbers(12))
    found = [float(step(iterator)) for _ in range(12)]
    np.testing.assert_allclose(found, np.arange(1, 13) * (world.size + 1), rtol=1e-5)


def test_an_operation_waits_for_the_pipeline_of_its_own_step():
    arrived = threading.Event()

    def generate():
        for number in range(4):
            if number == 2:
                arrived.set()
            yield float(number)

    spec = tf.TensorSpec((), tf.float32)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec).prefetch(4)

    @tf.function
    def step(iterator):
        def wait(x):
            assert arrived.wait(30)
            return x

        return averaged(tf.ensure_shape(tf.numpy_function(wait, [next(iterator)], tf.float32), ()))

    assert float(step(iter(dataset))) == 0


def test_python_in_a_step_runs_a_graph():
    @tf.function
    def inner(x):
        return tf.reduce_sum(tf.matmul(x, x)) + tf.reduce_max(x)

    @tf.function
    def step(x):
        found = tf.py_function(inner, [x], tf.float32)
        return averaged(tf.ensure_shape(found, ()))

    assert float(step(tf.ones((4, 4)))) == 65


def test_an_operation_that_starts_and_one_that_waits():
    handles = {}

    def begin(array):
        handles["sum"] = keras_dist.allreduce_async(array.copy(), "sum")
        return array

    @tf.function
    def step(x):
        started = on_host(lambda array: [begin(array)], [x], [x.shape])[0]
        with tf.control_dependencies([started]):
            between = tf.reduce_sum(tf.matmul(tf.ones((64, 64)), tf.ones((64, 64))))
        waited = on_host(lambda _: [handles.pop("sum").wait()], [started], [x.shape])[0]
        return waited, between

    waited, between = step(tf.ones(8))
    np.testing.assert_array_equal(waited, np.full(8, world.size))
    assert float(between) == 64**3


def test_fit_with_validation_from_pipelines_of_python():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.001)), loss="mse")

    def data():
        rows = numbers(8).map(lambda x: (x[tf.newaxis], x[tf.newaxis]))
        return rows.apply(tf.data.experimental.assert_cardinality(8)).batch(2)

    history = model.fit(data(), validation_data=data(), epochs=2, verbose=0)
    assert np.isfinite(history.history["val_loss"]).all()
    keras_dist.verify_replicas(model)
