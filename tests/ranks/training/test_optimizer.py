"""`DistributedOptimizer` on n ranks with batch size b trains like one process with n*b."""

import contextlib
import dataclasses
import subprocess
import sys

import keras
import numpy as np
import pytest
from small_training import (
    BATCH,
    CLASSES,
    FEATURES,
    STEPS,
    agreed,
    assert_close,
    compiled,
    fit_rows,
    global_data,
    make_data,
    make_model,
    rows_of_rank,
    weights_of,
)
from start_jobs import lean

import keras_dist
from keras_dist import config, errors

pytestmark = pytest.mark.jobs("training", "tensorflow-1", "jax-2")

BACKEND = keras.backend.backend()
on_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="only TensorFlow gives the gradient of an embedding as rows"
)


# Compile options with different optimizer steps.
COMPILE_OPTIONS = [{}, {"jit_compile": False}] if BACKEND == "tensorflow" else [{}]


class Stairs(keras.optimizers.schedules.LearningRateSchedule):
    """A custom schedule: the rate halves every other step."""

    def __call__(self, step):
        return 0.1 * 0.5 ** keras.ops.cast(step // 2, "float32")


DRAWN = "sgd", "momentum and clipnorm", "adam"  # by test_exactness
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum and clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "nesterov and global clipnorm": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, global_clipnorm=0.1
    ),
    "lars": lambda: keras_dist.optimizers.LARS(2.0, weight_decay=0.01, trust_coefficient=0.02),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW with decay, averaged weights and a cosine schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.02, 6),
        weight_decay=0.1,
        use_ema=True,
        ema_momentum=0.9,
    ),
    "accumulation": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=3),
    "schedule, incomplete accumulation, averaged weights": lambda: keras.optimizers.SGD(
        Stairs(),
        momentum=0.9,
        nesterov=True,
        global_clipnorm=0.1,
        gradient_accumulation_steps=4,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=5,
    ),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    OPTIMIZERS["several"] = lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*/bias": keras.optimizers.Adam(0.01)}
        )
    )


def train_both(make_optimizer, make=make_model, fit=None, eagerly=True, **options):
    """Trains on each rank's rows with keras_dist and on all rows without; returns both models."""
    x, y = global_data()
    plain = make(optimizer=make_optimizer())
    # Tracing takes longer than the steps; on one rank the bits of a graph are compared.
    plain.run_eagerly = eagerly and BACKEND == "tensorflow" and keras_dist.size() > 1
    plain.fit(x, y, batch_size=BATCH * keras_dist.size(), shuffle=False, verbose=0)
    model = make(optimizer=keras_dist.DistributedOptimizer(make_optimizer()), **options)
    fit = fit or fit_rows
    fit(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    return model, plain


def train_on_batches(model, x, y):
    for start in range(0, len(x), BATCH):
        model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])


@pytest.mark.jobs("steps")
@pytest.mark.parity("`fit` ends with the weights of one process: {name}")
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in DRAWN])
def test_weights_equal_those_of_one_process(name):
    model, plain = train_both(OPTIMIZERS[name])
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.jobs("tensorflow-3")
@pytest.mark.parity("the same with `{options}`")
@pytest.mark.parametrize(
    "options",
    [{"steps_per_execution": 4}, {"run_eagerly": True}, {"jit_compile": True}],
    ids=str,
)
def test_compile_options_give_the_same_weights(options):
    if BACKEND == "torch" and options != {"run_eagerly": True}:
        pytest.skip("Keras on torch has no steps_per_execution, and compiles for minutes")
    model, plain = train_both(OPTIMIZERS["momentum and clipnorm"], **options)
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.jobs("steps")
@pytest.mark.parity("mixed bfloat16")
def test_mixed_bfloat16_gives_the_same_weights_up_to_rounding():
    def make(optimizer, **options):
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return make_model(optimizer, **options)
        finally:
            keras.config.set_dtype_policy("float32")

    model, plain = train_both(OPTIMIZERS["momentum and clipnorm"], make)
    start = weights_of(make_model())
    moved = [plain - begin for plain, begin in zip(weights_of(plain), start, strict=True)]
    assert_close(
        [weight - begin for weight, begin in zip(weights_of(model), start, strict=True)],
        moved,
        relative=0.02,
    )


@pytest.mark.parity("`train_on_batch`, without callbacks")
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_train_on_batch_needs_no_callbacks(options):
    model, plain = train_both(OPTIMIZERS["sgd"], fit=train_on_batches, **options)
    assert_close(weights_of(model), weights_of(plain))
    if "jit_compile" in options:  # the option is suspended for train steps only
        x, y = make_data(BATCH)
        assert model.jit_compile is True
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)


@pytest.mark.parametrize("bucket_nbytes", [1, 10**9])
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=str)
def test_buckets_of_any_size_give_the_same_weights(monkeypatch, bucket_nbytes, options):
    settings = dataclasses.replace(config.settings(), bucket_nbytes=bucket_nbytes)
    monkeypatch.setattr(config, "settings", lambda: settings)
    model, plain = train_both(OPTIMIZERS["sgd"], **options)
    assert_close(weights_of(model), weights_of(plain))


class Keeping(keras.optimizers.Optimizer):
    """Applies the current gradient and the last but one."""

    def build(self, variables):
        super().build(variables)
        self.last = self.add_optimizer_variables(variables, "last")
        self.older = self.add_optimizer_variables(variables, "older")

    def update_step(self, gradient, variable, learning_rate):
        place = self._get_variable_index(variable)
        last, older = self.last[place], self.older[place]
        self.assign_sub(variable, learning_rate * (gradient + older.value))
        self.assign(older, last.value)
        self.assign(last, gradient)


@pytest.mark.parametrize("options", COMPILE_OPTIONS, ids=str)
def test_an_optimizer_may_keep_gradients(options):
    def make(optimizer):  # gradients of 1 MiB are reduced in slices and not copied
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(512, "tanh"), keras.layers.Dense(512, "tanh")]
        last = keras.layers.Dense(CLASSES, "softmax")
        model = keras.Sequential([keras.Input((FEATURES,)), *layers, last])
        return compiled(model, optimizer, **options)

    ours, plain = train_both(lambda: Keeping(0.01), make)
    assert_close(weights_of(ours), weights_of(plain))


def test_wrapping_after_a_step_was_traced_takes_effect():
    x, y = global_data()
    plain, model = make_model(), make_model()
    for start in range(0, len(x), BATCH * keras_dist.size()):
        rows = slice(start, start + BATCH * keras_dist.size())
        plain.train_on_batch(x[rows], y[rows])
    # Traces the step without a reduction; the data changes no weight.
    model.optimizer.learning_rate = 0.0
    model.train_on_batch(x[:BATCH], y[:BATCH])
    model.optimizer.learning_rate = 0.1
    keras_dist.DistributedOptimizer(model.optimizer)
    train_on_batches(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    assert_close(weights_of(model), weights_of(plain))


def test_a_model_trains_on_after_shutdown_and_init():
    model = make_model(optimizer=keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, y = make_data(8, seed=keras_dist.rank())
    for _ in range(2):
        model.fit(x, y, verbose=0, callbacks=keras_dist.callbacks())
        keras_dist.verify_replicas(model)
        keras_dist.shutdown()
        assert not keras_dist.is_initialized()
        keras_dist.init()
        assert agreed([weight.tobytes() for weight in weights_of(model)])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of tf.function alone")
@pytest.mark.parametrize("reduces", ["tape", "optimizer"])
def test_a_traced_step_runs_after_shutdown_and_init(reduces):
    import tensorflow as tf

    import keras_dist.tensorflow as hvd

    x, y = make_data(4, seed=keras_dist.rank())

    def weights_after(steps):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(9, 2), keras.layers.Flatten()]
        layers += [keras_dist.layers.SyncBatchNormalization(), keras.layers.Dense(3, "softmax")]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        wrap = keras_dist.DistributedOptimizer if reduces == "optimizer" else (lambda plain: plain)
        optimizer = wrap(keras.optimizers.SGD(0.1))

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
            tape = hvd.DistributedGradientTape(tape) if reduces == "tape" else tape
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

        for between in steps:
            step(tf.constant(abs(x) * 9 % 9), tf.constant(y))
            between()
        return weights_of(model)

    def rejoin():
        keras_dist.shutdown()
        keras_dist.init()

    once, twice = weights_after([lambda: None] * 3), weights_after([rejoin] * 3)
    for weight, other in zip(once, twice, strict=True):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.parity("a subclassed model that is not built")
def test_a_subclassed_model_that_is_not_built(monkeypatch):
    class Deferred(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(16, activation="relu")
            self.outer = keras.layers.Dense(3, activation="softmax")

        def call(self, x):
            return self.outer(self.inner(x))

    def make(**options):
        keras.utils.set_random_seed(1)
        return compiled(Deferred(), **options)

    model, plain = train_both(OPTIMIZERS["adam"], make)
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.parity("the sum of gradients instead of their average")
def test_sum_adds_gradients():
    x, y = global_data()
    n = keras_dist.size()
    plain = make_model(optimizer=keras.optimizers.SGD(0.1 * n))
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1), op="Sum")
    model = make_model(optimizer=optimizer)
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    assert_close(weights_of(model), weights_of(plain))


def embedding_model(optimizer=None, frozen=False):
    keras.utils.set_random_seed(1)
    words = keras.Input((4,), dtype="int32")
    vectors = keras.layers.Embedding(50, 8, name="table")(words)
    hidden = keras.layers.Dense(8, activation="relu", trainable=not frozen)(vectors)
    output = keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(hidden))
    return compiled(keras.Model(words, output), optimizer)


class DenseAdam(keras.optimizers.Adam):
    """Adam on the dense gradient; Keras' Adam squares repeated rows separately."""

    def _clip_gradients(self, grads):
        import tensorflow as tf

        return super()._clip_gradients([tf.convert_to_tensor(grad) for grad in grads])


@pytest.mark.jobs("steps")
@pytest.mark.parity("gradients of embeddings are exchanged as rows")
@on_tensorflow
@pytest.mark.parametrize(
    ("optimizer", "dense"),
    [(keras.optimizers.SGD, keras.optimizers.SGD), (keras.optimizers.Adam, DenseAdam)],
)
def test_embedding_gradients_travel_as_rows(optimizer, dense):
    n = keras_dist.size()
    rng = np.random.default_rng(3)
    x = rng.integers(0, 20, (STEPS * BATCH * n, 4))
    y = rng.integers(0, 3, len(x))
    plain = embedding_model(dense(0.01))
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    import tensorflow as tf

    seen = []

    class Watched(optimizer):
        def _clip_gradients(self, grads):
            seen.extend(grads)
            return super()._clip_gradients(grads)

    model = embedding_model(keras_dist.DistributedOptimizer(Watched(0.01)))
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    assert any(isinstance(gradient, tf.IndexedSlices) for gradient in seen)
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.parity("frozen layers, variables without a gradient")
def test_frozen_layers_and_variables_without_a_gradient():
    class Unused(keras.layers.Layer):
        def build(self, shape):
            self.used = self.add_weight(shape=(shape[-1],), name="used", initializer="ones")
            self.unused = self.add_weight(shape=(3,), name="unused", initializer="ones")

        def call(self, x):
            return x * self.used

    def make(optimizer):
        keras.utils.set_random_seed(1)
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, trainable=False),
            Unused(),
            keras.layers.Dense(3, activation="softmax"),
        ]
        return compiled(keras.Sequential(layers), optimizer)

    # On JAX such a variable has a gradient of zeros, without a warning.
    warned = pytest.warns(UserWarning, match="Gradients do not exist")
    with contextlib.nullcontext() if BACKEND == "jax" else warned:
        model, plain = train_both(OPTIMIZERS["adam"], make)
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.parity("replicas equal bit for bit, with dropout and batch normalisation")
def test_replicas_are_equal_with_dropout_and_batch_normalisation():
    keras.utils.set_random_seed(keras_dist.rank())  # different weights and seeds on every rank
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model = make_model(regularised=True, optimizer=optimizer)
    for weight in model.weights:
        weight.assign(weight + keras_dist.rank())
    x, y = make_data(40, seed=keras_dist.rank())
    for _ in range(2):
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=keras_dist.callbacks())
        keras_dist.verify_replicas(model)
        assert agreed([weight.tobytes() for weight in weights_of(model)])
        assert agreed([np.array(v).tobytes() for v in model.optimizer.variables])


@pytest.mark.parity("dropout differs between ranks")
def test_dropout_differs_by_rank_and_the_root_keeps_its_seed():
    model = make_model(
        regularised=True, optimizer=keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    )
    generator = model.layers[2].seed_generator
    before = np.array(generator.state)
    x, y = make_data(8)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=keras_dist.callbacks())
    seeds = keras_dist.allgather_object(int(np.array(generator.state)[0]))
    assert len(set(seeds)) == keras_dist.size()
    assert seeds[0] == before[0]
    model.fit(x, y, batch_size=8, verbose=0, callbacks=keras_dist.callbacks())
    assert keras_dist.allgather_object(int(np.array(generator.state)[0])) == seeds


@pytest.mark.parity("`fit` with a loss scale equals `fit` without one")
def test_a_loss_scale_leaves_the_weights_of_fit():
    x, y = make_data(2 * BATCH)
    scale = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0)
    optimizers = scale, keras.optimizers.SGD(0.1)
    scaled, plain = [make_model(keras_dist.DistributedOptimizer(each)) for each in optimizers]
    for model in (scaled, plain):
        fit_rows(model, x, y)
    assert_close(weights_of(scaled), weights_of(plain))


@pytest.mark.jobs("steps")
@pytest.mark.parity("`mixed_float16`: an overflow on one rank skips the step on all")
@pytest.mark.parametrize("wrap_outside", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(wrap_outside):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.SGD(0.1)
        if wrap_outside:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model = make_model(optimizer=keras_dist.DistributedOptimizer(optimizer))
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = make_data(3 * BATCH)
    fit_rows(model, x, y)  # some backends overflow until the scale has adapted
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    before = int(model.optimizer.inner_optimizer.iterations)
    if keras_dist.rank() == keras_dist.size() - 1:
        x[BATCH : 2 * BATCH] = 1e30  # the second of three steps
    fit_rows(model, x, y)
    keras_dist.verify_replicas(model)
    assert int(model.optimizer.inner_optimizer.iterations) == before + 2
    assert all(np.isfinite(weight).all() for weight in weights_of(model))


def test_one_rank_equals_plain_keras_bit_for_bit():
    if keras_dist.size() > 1:
        pytest.skip("several ranks sum in another order")
    model, plain = train_both(OPTIMIZERS["adam"])
    for weight, expected in zip(weights_of(model), weights_of(plain), strict=True):
        assert weight.tobytes() == expected.tobytes()


# --- Class, configuration and saved models


def test_class_state_and_config_stay():
    optimizer = keras.optimizers.Adam(0.01, clipnorm=1.0)
    variables = [keras.Variable(np.ones(3, "float32"))]
    optimizer.build(variables)
    optimizer.apply([np.ones(3, "float32")], variables)
    state = [np.array(variable) for variable in optimizer.variables]
    config = optimizer.get_config()
    wrapped = keras_dist.DistributedOptimizer(optimizer)
    assert wrapped is optimizer
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert type(wrapped).__name__ == "Adam"
    assert wrapped.get_config() == config
    for variable, before in zip(wrapped.variables, state, strict=True):
        np.testing.assert_array_equal(np.array(variable), before)


def test_a_configuration_makes_an_optimizer_of_the_users_class():
    wrapped = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    other = type(wrapped).from_config(wrapped.get_config())
    assert isinstance(other, keras.optimizers.Adam) and type(other).__name__ == "Adam"
    assert other.get_config() == wrapped.get_config()


LOAD_PLAIN = """
import sys
sys.modules["keras_dist"] = None
sys.modules["mpi4py"] = None
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
assert type(model.optimizer) is type(keras.optimizers.Adam()), type(model.optimizer)
assert int(model.optimizer.iterations) == int(sys.argv[2])
weights = np.load(sys.argv[3])
for i, weight in enumerate(model.get_weights()):
    np.testing.assert_array_equal(weight, weights[f"w{i}"])
for i, variable in enumerate(model.optimizer.variables):
    np.testing.assert_array_equal(np.array(variable), weights[f"o{i}"])
model.fit(np.zeros((4, 6)), np.zeros(4), verbose=0)
"""


@pytest.mark.parity("a saved model loads without keras_dist")
def test_a_saved_model_loads_without_keras_dist(shared_tmp_path):
    model, _ = train_both(OPTIMIZERS["adam"])
    path = shared_tmp_path / f"model{keras_dist.rank()}.keras"
    model.save(path)
    values = {f"w{i}": w for i, w in enumerate(weights_of(model))}
    values |= {f"o{i}": np.array(v) for i, v in enumerate(model.optimizer.variables)}
    np.savez(path.with_suffix(".npz"), **values)
    if keras_dist.rank() == 0:
        arguments = [str(path), str(STEPS), str(path.with_suffix(".npz"))]
        subprocess.run([sys.executable, "-c", LOAD_PLAIN, *arguments], check=True, env=lean())


# --- Different models


@pytest.mark.parity("different models are an error on every rank")
def test_different_models_are_an_error_before_the_first_step():
    if keras_dist.size() == 1:
        pytest.skip("a single rank has no other to differ from")
    odd = keras_dist.rank() == keras_dist.size() - 1
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(5 if odd else 4, name="hidden"),
        keras.layers.Dense(3, activation="softmax", name="output"),
    ]
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    # An automatic name would contain a number that depends on earlier models.
    model = compiled(keras.Sequential(layers, name="classifier"), optimizer)
    x, y = make_data(8)
    with pytest.raises(errors.MismatchError) as caught:
        model.fit(x, y, verbose=0, callbacks=keras_dist.callbacks())
    last = keras_dist.size() - 1
    assert agreed(str(caught.value))
    assert str(caught.value) == (
        f"[rank {last} of {last + 1}] Expected 'hidden/kernel' with shape (6, 4) as on rank 0. "
        "Received: (6, 5). Build the same model, with the same optimizer, on every rank."
    ).replace("'hidden/kernel'", repr(model.weights[0].path))


def test_different_models_are_an_error_without_callbacks():
    if keras_dist.size() == 1:
        pytest.skip("a single rank has no other to differ from")
    odd = keras_dist.rank() == keras_dist.size() - 1
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(3, use_bias=not odd, activation="softmax"),
    ]
    model = compiled(keras.Sequential(layers), optimizer)
    x, y = make_data(8)
    with pytest.raises(Exception, match=r"Expected .* as on rank 0. Received: ") as caught:
        model.train_on_batch(x, y)
    assert "Build the same model" in str(caught.value)
