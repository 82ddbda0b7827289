"""`keras_dist.tensorflow` for the tests of all faces, as `face_torch` and `face_jax` for theirs."""

import keras
import numpy as np
import tensorflow as tf

import keras_dist.tensorflow as hvd
from keras_dist import errors

DTYPES = (
    "bool uint8 int8 uint16 int16 int32 int64 float16 bfloat16 float32 float64 complex64".split()
)
NARROW = ("float8_e5m2",)  # can be summed
COUNTS = "int32"
# Recorded: eagerly, while a tape is recording.
FORMS, GRADIENTS = ("eager", "recorded", "graph"), ("eager", "graph")
TENSOR = tf.Tensor
NO_GRADIENT = "Average or Sum in an allreduce"


def raised_for(kinds, form):
    """Returns the class of the errors of a form that are of one of some classes of keras_dist."""
    classes = {
        errors.MismatchError: tf.errors.FailedPreconditionError,
        errors.ArgumentError: tf.errors.InvalidArgumentError,
    }
    return classes.get(kinds[0], tf.errors.OpError) if form != "graph" else tf.errors.OpError


def tensor(array):
    return tf.constant(array)


def array(result):
    return np.asarray(result.numpy())


def kind_of(result):
    """Returns the dtype of a tensor by name, and its device."""
    return result.dtype.name, result.device


def operation(name, form):
    """Returns an operation in a form, or `None`."""
    return getattr(hvd, name)


def run(form, program, *tensors):
    """Returns the results of a function of tensors."""
    if form == "graph":
        return tf.function(program, autograph=False)(*tensors)
    if form == "eager":
        return program(*tensors)
    with tf.GradientTape() as tape:
        tape.watch([one for one in tensors if one.dtype.is_floating])
        return program(*tensors)


def flat(results):
    return tf.concat([tf.reshape(result, [-1]) for result in results], 0)


def gradient(form, function, given, weights):
    """Returns the gradient of the weighted sum of the results of a function of an array."""

    def derive(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(flat(function(x)) * weights)
        return tape.gradient(total, x)

    return run(form, derive, tf.constant(given)).numpy()


def second_gradient(form, function, given, weights, others):
    """Returns the gradient of a weighted sum of the gradient of half the squares of results."""

    def derive(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.reduce_sum(flat(function(x)) ** 2 * weights) / 2
            slope = tf.reduce_sum(tape.gradient(total, x) * others)
        return outer.gradient(slope, x)

    return run(form, derive, tf.constant(given)).numpy()


def sparse_allreduce(form, values, indices, shape, **options):
    """Returns the sum or the average of sparse tensors of all ranks as a dense array."""

    def reduce(values, indices):
        rows = tf.IndexedSlices(values, indices, dense_shape=tf.constant(shape, tf.int64))
        result = hvd.allreduce(rows, **options)
        assert isinstance(result, tf.IndexedSlices)
        return result

    return tf.convert_to_tensor(run(form, reduce, tf.constant(values), tf.constant(indices)))


def broadcast_state(arrays, root_rank, **options):
    """Returns arrays after their broadcast as the weights of a model."""
    variables = [
        (tf.Variable if number % 2 else keras.Variable)(one, dtype=one.dtype.name)
        for number, one in enumerate(arrays)
    ]
    assert hvd.broadcast_variables(variables, root_rank, **options) is None
    return list(map(np.asarray, variables))


def trained(form, weights, batches, options, kind="sgd", rate=0.1, is_sparse=False):
    """Returns weights after a loop by hand, of one process where `options` is `None`."""
    values = [tf.Variable(one, name=str(number)) for number, one in enumerate(weights)]
    optimizer = {
        "sgd": lambda: tf.optimizers.SGD(rate),
        "momentum": lambda: tf.optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-3),
        "adam": lambda: tf.optimizers.Adam(0.01),
    }[kind]()

    def step(tokens, y):
        with tf.GradientTape() as tape:
            table, kernel, last = values
            rows = tf.gather(table, tokens) if is_sparse else tf.one_hot(tokens, 9) @ table
            found = tf.tanh(tf.reshape(rows, [len(tokens), -1]) @ kernel) @ last
            loss = tf.reduce_mean((found - y) ** 2)
        tape = tape if options is None else hvd.DistributedGradientTape(tape, **options)
        optimizer.apply_gradients(zip(tape.gradient(loss, values), values, strict=True))

    run_step = tf.function(step) if form == "graph" else step
    for tokens, y in batches:
        run_step(tf.constant(tokens), tf.constant(y))
    return list(map(np.asarray, values))


class Halved(hvd.Compressor):
    """A custom compression as in scripts of Horovod: static methods on tensors."""

    @staticmethod
    def compress(tensor):
        return tf.cast(tensor, tf.float64) / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tf.cast(tensor * 2, ctx)
