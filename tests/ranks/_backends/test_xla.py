"""Train steps on TensorFlow as two XLA programs with the reduction between them."""

import collections
import inspect

import keras
import numpy as np
import pytest
from small_training import (
    CLASSES,
    FEATURES,
    agreed,
    assert_close,
    compiled,
    make_data,
    make_model,
    rows_of_rank,
    weights_of,
    with_logs,
)

import keras_dist

pytestmark = [
    pytest.mark.jobs("tensorflow-2"),
    pytest.mark.skipif(
        keras.backend.backend() != "tensorflow", reason="tests the TensorFlow backend"
    ),
]
BATCH, STEPS = 4, 4


@pytest.fixture
def notices(caplog):
    """Returns a function that returns the warnings of keras_dist, with those given once enabled."""
    from keras_dist._backends import tensorflow_step

    tensorflow_step._warn_once.cache_clear()
    return lambda: [r.getMessage() for r in caplog.records if r.name == "keras_dist"]


def trained_like_one_process(optimizer, **options):
    """Trains plain Keras on all rows, and with XLA each rank on its rows; returns the latter."""
    x, y = make_data(BATCH * STEPS * keras_dist.size())
    plain = make_model(optimizer())
    plain.fit(x, y, batch_size=BATCH * keras_dist.size(), shuffle=False, verbose=0)
    distributed = keras_dist.DistributedOptimizer(optimizer())
    model = make_model(distributed, jit_compile=True, **options)
    x, y = rows_of_rank(x, BATCH), rows_of_rank(y, BATCH)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=keras_dist.callbacks())
    assert agreed([weight.tobytes() for weight in weights_of(model)])
    assert agreed([np.array(v).tobytes() for v in model.optimizer.variables])
    assert_close(weights_of(model), weights_of(plain))
    return model


def operations(model):
    """Counts the operations of a train step that XLA compiles, and the others."""
    import tensorflow as tf

    batches = iter(tf.data.Dataset.from_tensors(make_data(BATCH)))
    model.make_train_function()
    steps = inspect.getclosurevars(inspect.unwrap(model.train_function)).nonlocals[
        "multi_step_on_iterator"
    ]
    graph = steps.get_concrete_function(batches).graph.as_graph_def()
    compiles, others = collections.Counter(), collections.Counter()
    for function in graph.library.function:
        count = compiles if function.attr["_XlaMustCompile"].b else others
        count.update(node.op for node in function.node_def)
    return compiles, others


def check_compiled(model, calls=1):
    """Checks that only the operations between gradient and update are not compiled.

    The host is called for the gradients, and perhaps for the rows of the batch.
    """
    if keras_dist.size() == 1:
        return  # Keras compiles the step as one program
    compiles, others = operations(model)
    assert compiles["MatMul"] == 5  # two forward, three backward: inputs have no gradient
    assert compiles["Square"]  # the update
    assert not others["MatMul"]
    assert not others["Square"]
    host_calls = ("PyFunc", "EagerPyFunc")  # the second one takes arrays of a GPU
    assert sum(compiles[name] for name in host_calls) == 0
    assert sum(others[name] for name in host_calls) == calls


def embedding(optimizer=None, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((FEATURES,)), keras.layers.Embedding(20, 3), keras.layers.Flatten()]
    layers += [keras.layers.Dense(CLASSES, activation="softmax")]
    return compiled(keras.Sequential(layers), optimizer, **options)


def test_gradients_and_update_are_compiled_and_the_model_is_restored(notices):
    options = {"clipnorm": 0.05, "weight_decay": 0.1, "use_ema": True}
    model = trained_like_one_process(
        lambda: keras.optimizers.Nadam(0.01, **options), steps_per_execution=3
    )
    check_compiled(model)
    assert model.jit_compile is True
    assert not notices()
    assert "train_step" not in vars(model)
    assert not {"apply_gradients", "_distributed_tf_update_step"} & set(vars(model.optimizer))


@pytest.mark.skipif(keras_dist.size() == 1, reason="of ranks that reduce")
@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_read_of_a_table_copies_nothing_after_an_update_of_its_rows(jit_compile):
    model = embedding(
        keras_dist.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), jit_compile=jit_compile
    )
    x, y = make_data(BATCH)
    x = np.abs(10 * x).astype(int) % 20
    model.train_on_batch(x, y)
    if jit_compile:
        compiles, others = operations(model)
        assert compiles["GatherV2"]
        assert not others["MatMul"]
    every = [*model.weights, *model.optimizer.variables]
    tables = [variable for variable in every if variable.shape == (20, 3)]
    assert len(tables) == 2  # with the accumulator

    def read(table):
        return np.asarray(memoryview(table.value.read_value()))

    held = [read(table) for table in tables]
    pairs = [*zip(tables, held, strict=True)]
    assert all(np.shares_memory(read(table), array) for table, array in pairs)
    values = [array.copy() for array in held]
    model.train_on_batch(x, y)  # what has been read stays
    np.testing.assert_array_equal(held, values)
    assert not any(np.array_equal(read(table), array) for table, array in pairs)


def test_a_loss_scale_optimizer():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model = make_model(optimizer, jit_compile=True)
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = make_data(3 * BATCH, seed=keras_dist.rank())
    if keras_dist.rank() == keras_dist.size() - 1:
        x[BATCH : 2 * BATCH] = 1e30  # the second of three steps
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=keras_dist.callbacks())
    keras_dist.verify_replicas(model)
    assert int(model.optimizer.inner_optimizer.iterations) == 2
    check_compiled(model)


class OwnMetrics(keras.Model):
    """Computes a metric of the weights after the update."""

    def compute_metrics(self, *arguments, **options):
        return {"norm": keras.ops.norm(self.layers[-1].kernel)}


@pytest.mark.parametrize(
    ("model_class", "normalisation", "reason"),
    [
        (with_logs(dict), keras.layers.BatchNormalization, "overrides train_step"),
        (OwnMetrics, keras.layers.BatchNormalization, "overrides compute_metrics"),
        (
            keras.Model,
            keras_dist.layers.SyncBatchNormalization,
            "layer of class SyncBatchNormalization",
        ),
    ],
    ids=["train_step", "compute_metrics", "SyncBatchNormalization"],
)
def test_a_step_that_cannot_be_compiled_has_a_warning(model_class, normalisation, reason, notices):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    hidden = normalisation()(keras.layers.Dense(8)(inputs))
    outputs = keras.layers.Dense(CLASSES, activation="softmax")(hidden)
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = compiled(model_class(inputs, outputs), optimizer, jit_compile=True)
    x, y = make_data(BATCH, seed=keras_dist.rank())
    logs = [model.train_on_batch(x, y, return_dict=True) for _ in range(2)][-1]
    assert agreed([np.array(weight).tobytes() for weight in model.trainable_weights])
    if "norm" in logs:
        np.testing.assert_allclose(logs["norm"], np.linalg.norm(weights_of(model)[-2]), rtol=1e-6)
    alone = keras_dist.size() == 1
    assert bool(operations(model)[0]["MatMul"]) == alone
    assert model.jit_compile is True
    assert len(notices()) == (not alone)
    assert all(reason in notice for notice in notices())


def test_unequal_batches_are_weighed_outside_of_xla(notices):
    n, rank = keras_dist.size(), keras_dist.rank()
    x, y = make_data(BATCH * n + sum(range(n)))
    ends = np.cumsum([BATCH + other for other in range(n)])
    rows = slice(ends[rank] - BATCH - rank, ends[rank])
    loss = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    plain, model = make_model(keras.optimizers.Adam(0.01)), make_model(optimizer)
    for each in (plain, model):
        each.layers[-1].activity_regularizer = keras.regularizers.L2(0.1)
    plain.compile(plain.optimizer, loss)
    model.compile(model.optimizer, loss, jit_compile=True)
    expected = plain.fit(x, y, batch_size=len(x), verbose=0).history["loss"]
    options = {"batch_size": len(x), "verbose": 0, "callbacks": keras_dist.callbacks()}
    logged = model.fit(x[rows], y[rows], **options).history["loss"]
    assert_close(weights_of(model), weights_of(plain))
    np.testing.assert_allclose(logged, expected, rtol=1e-5)
    check_compiled(model, calls=2)
    assert not notices()


def test_masks_give_a_step_without_xla(notices):
    if keras_dist.size() == 1:
        pytest.skip("one rank needs no weights of others")
    tokens = np.array([[1, 2, 3], [4, 0, 0]])
    layers = [keras.Input((3,)), keras.layers.Embedding(5, 2, mask_zero=True)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=True)
    model.train_on_batch(tokens, tokens[:, :, None] / 4)
    assert any("masks or weights" in notice for notice in notices())


class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scale = keras.Variable(np.full(shape[-1:], 2.0, "float32"))  # not an initializer

    def call(self, x):
        return x * self.scale


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.scaled = Scaled()

    def call(self, x):
        return self.scaled(self.dense(x))


@pytest.mark.parametrize("task", ["fit", "train_on_batch", "evaluate"])
def test_a_first_step_without_xla_builds_the_model(task):
    """Losses of sequences are divided by the steps of all ranks."""
    model = Unbuilt()
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=True)
    x, y = np.ones((4, 5, 2), "float32"), np.zeros((4, 5, 1), "float32")
    if task == "evaluate":
        assert model.evaluate(x, y, verbose=0) == pytest.approx(16)
        return
    if task == "fit":
        loss = model.fit(x, y, verbose=0).history["loss"][0]
    else:
        loss = model.train_on_batch(x, y)
    assert loss == pytest.approx(16)
    # The output is 4, so the gradient of all weights is 2 * 4 * 2.
    for weights, before in zip(weights_of(model), (1, 0, 2), strict=True):
        np.testing.assert_allclose(weights, np.full_like(weights, before - 1.6), rtol=1e-5)


@pytest.mark.skipif(keras_dist.size() == 1, reason="of the callbacks on several ranks")
@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_step_with_metrics_by_name_is_traced_once(jit_compile, monkeypatch):
    traces, step = [], keras.Model.train_step

    def train_step(model, data):
        traces.append(1)
        return step(model, data)

    monkeypatch.setattr(keras.Model, "train_step", train_step)
    model = make_model(jit_compile=jit_compile)
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    x, y = make_data(2 * BATCH, seed=keras_dist.rank())
    logs = model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=keras_dist.callbacks())
    assert traces == [1]
    assert logs.history["accuracy"]
