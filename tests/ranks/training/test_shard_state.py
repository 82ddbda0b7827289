"""`DistributedOptimizer(shard_state=True)`: the weights of whole updates, a slice of the state."""

import keras
import numpy as np
import pytest
from small_training import CLASSES, FEATURES, compiled, make_data

import keras_dist
from keras_dist import errors
from keras_dist.training.model_state import to_numpy

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")
on_tensorflow_as_well = pytest.mark.jobs("tensorflow-2")
in_gpu_memory = pytest.mark.jobs("training-double-torch-2")

SGD, Adam, AdamW = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW
WIDTH = 301  # not a multiple of the vectors of a processor
STEPS, BATCH = 5, 8

# Optimizers that cover each way in which a gradient or a weight enters the update of a slice.
OPTIMIZERS = {
    "SGD with momentum and global_clipnorm": lambda: SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, clipnorm=0.1),
    "AdamW": lambda: AdamW(keras.optimizers.schedules.CosineDecay(0.02, 6), weight_decay=0.1),
    "Adam with accumulation and use_ema": lambda: Adam(
        0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.9
    ),
}
OTHERS = {
    "SGD": lambda: SGD(0.1),
    "Adam": lambda: Adam(0.01, amsgrad=True, clipvalue=0.01),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
}


def make(optimizer, shard_state=True, is_traced=False):
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(WIDTH, activation="relu", kernel_constraint="max_norm"),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ]
    if isinstance(optimizer, AdamW):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    wrapped = keras_dist.DistributedOptimizer(optimizer, shard_state=shard_state)
    # Tracing takes longest on TensorFlow, and eager steps on JAX.
    eager = {"run_eagerly": keras.backend.backend() == "tensorflow" and not is_traced}
    return compiled(keras.Sequential(layers), wrapped, **eager)


def fit(model, epochs=1, callbacks=()):
    x, y = make_data(STEPS * BATCH, seed=keras_dist.rank())
    added = keras_dist.callbacks(*callbacks)
    model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=added)
    return model


def whole(epochs=1):
    """Returns the model whose updates are whole, after some epochs."""
    return fit(make(Adam(0.01), shard_state=False), epochs)


def assert_same_bits(variables, expected):
    for value, wanted in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(value), to_numpy(wanted))


def counts(model):
    """Returns the number of elements of the state of each variable."""
    return sum(int(np.prod(variable.shape)) for variable in model.optimizer.variables[2:])


@on_each_backend
@in_gpu_memory
@pytest.mark.long
@pytest.mark.parity("`shard_state=True`: weights equal those of whole updates bit for bit: {name}")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_have_the_bits_of_whole_updates(name):
    expected = fit(make(OPTIMIZERS[name](), shard_state=False, is_traced=True))
    model = fit(make(OPTIMIZERS[name](), is_traced=True))
    assert_same_bits(model.weights, expected.weights)
    keras_dist.verify_replicas(model)


@pytest.mark.slow
@pytest.mark.jobs("torch-3")
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_have_the_bits_of_whole_updates(name):
    model, expected = fit(make(OTHERS[name]())), fit(make(OTHERS[name](), shard_state=False))
    assert_same_bits(model.weights, expected.weights)


@on_each_backend
@in_gpu_memory
def test_without_callbacks_the_first_step_builds_the_slices_of_the_state():
    x, y = make_data(BATCH, seed=keras_dist.rank())
    model, expected = make(Adam(0.01)), make(Adam(0.01), shard_state=False)
    for trained in (model, expected):
        trained.train_on_batch(x, y)
        trained.train_on_batch(x, y)
    assert_same_bits(model.weights, expected.weights)
    assert counts(model) <= counts(expected) / keras_dist.size() + 2 * 128
    assert sum(keras_dist.allgather_object(counts(model))) == counts(expected)


@on_tensorflow_as_well
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="has no rows of gradients")
def test_rows_of_embeddings_update_slices():
    def train(shard_state):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(50, 6), keras.layers.Flatten(), keras.layers.Dense(1)]
        wrapped = keras_dist.DistributedOptimizer(Adam(0.1), shard_state=shard_state)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(wrapped, "mse")
        x = np.random.default_rng(keras_dist.rank()).integers(0, 50, (16, 3))
        model.fit(x, x[:, 0], 4, verbose=0, shuffle=False, callbacks=keras_dist.callbacks())
        return model

    assert_same_bits(train(True).weights, train(False).weights)


@pytest.mark.parametrize("writes", ["each rank", "a checkpoint of the root"])
def test_a_saved_model_is_a_whole_file_from_which_training_continues(writes, shared_tmp_path):
    if writes == "each rank":  # the state is gathered
        path = shared_tmp_path / f"{keras_dist.rank()}.keras"
        fit(make(Adam(0.01))).save(path)
    else:
        path = shared_tmp_path / "last.keras"
        callback = keras_dist.callbacks.ModelCheckpoint(str(path))
        fit(make(Adam(0.01)), callbacks=[callback])
    plain, expected = keras.saving.load_model(path), whole()
    assert_same_bits(plain.weights, expected.weights)
    assert_same_bits(plain.optimizer.variables, expected.optimizer.variables)
    fit(expected)
    if writes == "each rank":
        model = keras_dist.load_model(path)
        assert model.optimizer._keras_dist.options.shard_state
        if keras_dist.size() > 1:
            assert counts(model) < counts(expected)
    else:  # the root alone may load it
        model = keras_dist.load_model(path) if keras_dist.rank() == 0 else make(Adam(0.01))
    assert_same_bits(fit(model).weights, expected.weights)


@pytest.mark.parametrize("before, after", [(True, True), (True, False), (False, True)])
def test_a_backup_resumes_sharded_or_whole(before, after, shared_tmp_path):
    class Killed(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    def backup():
        return keras_dist.callbacks.BackupAndRestore(str(shared_tmp_path / "backup"))

    with pytest.raises(KeyboardInterrupt):
        fit(make(Adam(0.01), before), 2, [backup(), Killed()])
    model = fit(make(Adam(0.01), after), 2, [backup()])
    assert_same_bits(model.weights, whole(epochs=2).weights)


@on_each_backend
def test_assigned_weights_are_updated():
    def train(shard_state):
        model = fit(make(Adam(0.01), shard_state))
        held = [weight.value for weight in model.weights]  # may be in the memory of all ranks
        model.set_weights([weight + 1 for weight in model.get_weights()])
        fit(model, epochs=2)
        del held
        return model

    assert_same_bits(train(True).weights, train(False).weights)


class Custom(SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)


def wrap(optimizer, **options):
    return keras_dist.DistributedOptimizer(optimizer, shard_state=True, **options)


def compiled_in_a_loss_scale():
    model = make(SGD(0.1))
    model.compile(keras.optimizers.LossScaleOptimizer(model.optimizer), model.loss)
    return model


REFUSED = [
    ("Ftrl, which may", lambda: wrap(keras.optimizers.Ftrl(0.1))),
    ("Adafactor, which may", lambda: wrap(keras.optimizers.Adafactor(0.01))),
    ("LARS, which may", lambda: wrap(keras_dist.optimizers.LARS(0.1))),
    ("Custom, which may", lambda: wrap(Custom(0.1))),
    ("frequency=2", lambda: wrap(SGD(use_ema=True, ema_overwrite_frequency=2))),
    ("a LossScaleOptimizer", lambda: wrap(keras.optimizers.LossScaleOptimizer(SGD(0.1)))),
    ("a LossScaleOptimizer", lambda: fit(compiled_in_a_loss_scale())),  # before the first step
    (
        "local variables",
        lambda: keras_dist.PartialDistributedOptimizer(
            SGD(0.1), local_layers=keras.layers.Dense(2), shard_state=True
        ),
    ),
    ("local variables", lambda: wrap(SGD(0.1)).register_local_var(keras.Variable(0.0))),
    ("shard_state=True. Omit", lambda: keras_dist.elastic.KerasState(make(SGD(0.1)))),
]


@pytest.mark.parametrize(("received", "call"), REFUSED)
def test_what_cannot_be_sharded_is_refused(received, call):
    with pytest.raises(errors.ArgumentError, match=f"Received: .*{received}") as raised:
        call()
    assert "shard_state" in str(raised.value)


@pytest.mark.skipif(keras_dist.size() == 1, reason="there is no other set than that of all ranks")
def test_a_process_set_is_refused():
    ranks = keras_dist.add_process_set([0])
    with pytest.raises(errors.ArgumentError, match="all ranks to reduce, with shard_state"):
        wrap(SGD(0.1), process_set=ranks)
    keras_dist.remove_process_set(ranks)


@pytest.mark.skipif(keras_dist.size() == 1, reason="one rank cannot differ")
def test_ranks_that_differ_in_shard_state_raise():
    model = make(Adam(0.1), shard_state=keras_dist.rank() == 1)
    with pytest.raises(errors.MismatchError, match="sharded state"):
        fit(model)
