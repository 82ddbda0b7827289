"""`DistributedOptimizer` on n ranks with batch size b trains like one process with n*b."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from small_training import (
    BATCH,
    CLASSES,
    EAGER,
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

pytestmark = pytest.mark.jobs("hooks", "jax-2")

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


# test_exactness draws SGD and Adam, with each clipping and accumulation.
OPTIMIZERS = {
    "lars": lambda: keras_dist.optimizers.LARS(2.0, weight_decay=0.01, trust_coefficient=0.02),
    "AdamW with decay, averaged weights and a cosine schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.02, 6),
        weight_decay=0.1,
        use_ema=True,
        ema_momentum=0.9,
    ),
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


def train_both(make_optimizer, make=make_model, fit=fit_rows, eagerly=True, **options):
    """Trains on each rank's rows with keras_dist and on all rows without; returns both models."""
    x, y = global_data()
    plain = make(optimizer=make_optimizer())
    # Tracing takes longer than the steps; on one rank the bits of a graph are compared.
    plain.run_eagerly = eagerly and BACKEND == "tensorflow" and keras_dist.size() > 1
    model = make(optimizer=keras_dist.DistributedOptimizer(make_optimizer()), **options)
    # The second part goes on where the first has ended. Keras on JAX cannot do so with an average.
    ends = [len(x)] if BACKEND == "jax" and plain.optimizer.use_ema else [len(x) // 2, len(x)]
    for part in map(slice, [0, *ends], ends):
        plain.fit(x[part], y[part], BATCH * keras_dist.size(), shuffle=False, verbose=0)
        fit(model, rows_of_rank(x[part], BATCH), rows_of_rank(y[part], BATCH))
    keras_dist.verify_replicas(model)
    return model, plain


def train_on_batches(model, x, y):
    for start in range(0, len(x), BATCH):
        model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)


def adam():
    return keras.optimizers.Adam(0.01)


@pytest.mark.jobs("tensorflow-1", "jax-1", "torch-1", "torch-3", "openmpi-3")
@pytest.mark.parity("`fit` ends with the weights of one process: {name}")
# LARS computes most with whole variables, which the double for NCCL leaves in GPU memory.
@pytest.mark.parametrize(
    "name", [pytest.param("lars", marks=pytest.mark.jobs("double")), *list(OPTIMIZERS)[1:]]
)
def test_weights_equal_those_of_one_process(name):
    model, plain = train_both(OPTIMIZERS[name])
    assert_close(weights_of(model), weights_of(plain))
    if keras_dist.size() == 1:  # several ranks sum in another order
        for weight, expected in zip(weights_of(model), weights_of(plain), strict=True):
            assert weight.tobytes() == expected.tobytes()


@pytest.mark.jobs("tensorflow-1", "tensorflow-3")
@pytest.mark.parity("the same with `{options}`")
@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"run_eagerly": True}], ids=str)
def test_compile_options_give_the_same_weights(options):
    if BACKEND == "torch" and options != {"run_eagerly": True}:
        pytest.skip("Keras on torch has no steps_per_execution")
    model, plain = train_both(momentum, **options)
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.jobs("double")
@pytest.mark.parity("mixed bfloat16")
def test_mixed_bfloat16_gives_the_same_weights_up_to_rounding():
    def make(optimizer, **options):
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return make_model(optimizer, **options)
        finally:
            keras.config.set_dtype_policy("float32")

    model, plain = train_both(momentum, make)
    start = weights_of(make_model())
    moved = [plain - begin for plain, begin in zip(weights_of(plain), start, strict=True)]
    assert_close(
        [weight - begin for weight, begin in zip(weights_of(model), start, strict=True)],
        moved,
        relative=0.02,
    )


@pytest.mark.jobs("tensorflow-1")
@pytest.mark.parity("`train_on_batch`, without callbacks")
def test_train_on_batch_needs_no_callbacks():
    model, plain = train_both(momentum, fit=train_on_batches, jit_compile=True)
    assert_close(weights_of(model), weights_of(plain))
    x, y = make_data(BATCH)
    assert model.jit_compile is True  # the option is suspended for train steps only
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)


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
    plain, model = make_model(**EAGER), make_model()
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


@pytest.mark.jobs("tensorflow-1")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="of tf.function alone")
def test_a_traced_step_runs_after_shutdown_and_init():
    import tensorflow as tf

    import keras_dist.tensorflow as hvd

    x, y = make_data(4, seed=keras_dist.rank())

    def weights_after(steps):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(9, 2), keras.layers.Flatten()]
        layers += [keras_dist.layers.SyncBatchNormalization(), keras.layers.Dense(3, "softmax")]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        optimizer = keras.optimizers.SGD(0.1)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
            weights = model.trainable_variables
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
            optimizer.apply(gradients, weights)

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


def embedding_model(optimizer=None):
    keras.utils.set_random_seed(1)
    words = keras.Input((4,), dtype="int32")
    vectors = keras.layers.Embedding(50, 8, name="table")(words)
    output = keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(vectors))
    return compiled(keras.Model(words, output), optimizer)


class DenseAdam(keras.optimizers.Adam):
    """Adam on the dense gradient; Keras' Adam squares repeated rows separately."""

    def _clip_gradients(self, grads):
        import tensorflow as tf

        return super()._clip_gradients([tf.convert_to_tensor(grad) for grad in grads])


@pytest.mark.jobs("double-tensorflow-2")
@pytest.mark.parity("gradients of embeddings are exchanged as rows")
@on_tensorflow
@pytest.mark.parametrize(
    ("optimizer", "dense", "sparse_as_dense"),
    [
        (keras.optimizers.SGD, keras.optimizers.SGD, True),
        (keras.optimizers.Adam, DenseAdam, False),
    ],
)
def test_embedding_gradients_travel_as_rows(optimizer, dense, sparse_as_dense):
    n = keras_dist.size()
    rng = np.random.default_rng(3)
    x = rng.integers(0, 20, (STEPS * BATCH * n, 4))
    y = rng.integers(0, 3, len(x))
    plain = embedding_model(dense(0.01))
    plain.run_eagerly = True
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    seen = set()

    class Watched(optimizer):
        def _clip_gradients(self, grads):
            seen.update(type(grad).__name__ for grad in grads)
            return super()._clip_gradients(grads)

    wrapped = keras_dist.DistributedOptimizer(Watched(0.01), sparse_as_dense=sparse_as_dense)
    model = embedding_model(wrapped)
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    assert seen and ("IndexedSlices" in seen) != sparse_as_dense
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.skipif(keras_dist.size() not in (1, 2, 4), reason="Adasum needs a power of two")
def test_adasum_of_an_embedding():
    model = embedding_model(keras_dist.DistributedOptimizer(adam(), op=keras_dist.Adasum))
    rng = np.random.default_rng(keras_dist.rank())
    fit_rows(model, rng.integers(0, 20, (BATCH, 4)), rng.integers(0, 3, BATCH))
    keras_dist.verify_replicas(model)
    assert all(np.isfinite(weight).all() for weight in weights_of(model))


@pytest.mark.parity("replicas equal bit for bit, with dropout and batch normalisation")
@pytest.mark.parity("dropout differs between ranks")
def test_replicas_are_equal_with_dropout_and_batch_normalisation_in_further_fits():
    model = make_model(keras_dist.DistributedOptimizer(adam()), regularised=True)
    for weight in model.weights:
        weight.assign(weight + keras_dist.rank())
    generator = model.layers[2].seed_generator
    before, found = int(np.array(generator.state)[0]), []
    x, y = make_data(40, seed=keras_dist.rank())
    for number in range(3):
        if number == 2:
            keras_dist.shutdown()
            assert not keras_dist.is_initialized()
            keras_dist.init()
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=keras_dist.callbacks())
        keras_dist.verify_replicas(model)
        assert agreed([weight.tobytes() for weight in weights_of(model)])
        assert agreed([np.array(v).tobytes() for v in model.optimizer.variables])
        found.append(keras_dist.allgather_object(int(np.array(generator.state)[0])))
    assert len(set(found[0])) == keras_dist.size()
    assert found[0][0] == before  # the root keeps its seed
    assert found == [found[0]] * 3


@pytest.mark.jobs("double", "torch-3")
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


# --- Saved models

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
model.run_eagerly = keras.backend.backend() == "tensorflow"
model.fit(np.zeros((4, 6)), np.zeros(4), verbose=0)
"""


@pytest.mark.long
@pytest.mark.parity("a saved model loads without keras_dist")
def test_a_saved_model_loads_without_keras_dist(shared_tmp_path):
    model = make_model(keras_dist.DistributedOptimizer(adam()))
    fit_rows(model, *make_data(STEPS * BATCH))
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
def test_different_models_are_an_error():
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
