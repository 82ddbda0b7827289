"""`DistributedOptimizer(shard_state=True)`: the weights of whole updates, a slice of the state."""

import zipfile

import keras
import numpy as np
import pytest
from small_training import CLASSES, FEATURES, compiled, make_data

import keras_dist
from keras_dist import errors
from keras_dist.training.model_state import to_numpy

pytestmark = pytest.mark.jobs("training", "jax-2")

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


def make(optimizer, shard_state=True, **options):
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(WIDTH, activation="relu", kernel_constraint="max_norm"),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ]
    if isinstance(optimizer, AdamW):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    wrapped = keras_dist.DistributedOptimizer(optimizer, shard_state=shard_state, **options)
    return compiled(keras.Sequential(layers), wrapped)


def fit(model, epochs=1, callbacks=()):
    x, y = make_data(STEPS * BATCH, seed=keras_dist.rank())
    added = keras_dist.callbacks(*callbacks)
    model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=added)
    return model


def weights_of(model):
    return [to_numpy(weight) for weight in model.weights]


def assert_same_bits(model, expected):
    for value, wanted in zip(weights_of(model), weights_of(expected), strict=True):
        np.testing.assert_array_equal(value, wanted)


def counts(model):
    """Returns the number of elements of the state of each variable."""
    return sum(int(np.prod(variable.shape)) for variable in model.optimizer.variables[2:])


@pytest.mark.parity("`shard_state=True`: weights equal those of whole updates bit for bit: {name}")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_have_the_bits_of_whole_updates(name):
    whole = fit(make(OPTIMIZERS[name](), shard_state=False))
    model = fit(make(OPTIMIZERS[name]()))
    assert_same_bits(model, whole)
    keras_dist.verify_replicas(model)


@pytest.mark.slow
@pytest.mark.jobs("torch-3")
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_have_the_bits_of_whole_updates(name):
    assert_same_bits(fit(make(OTHERS[name]())), fit(make(OTHERS[name](), shard_state=False)))


def test_a_rank_holds_its_share_of_the_state():
    model, whole = make(Adam(0.01)), make(Adam(0.01), shard_state=False)
    for built in (model, whole):
        built.optimizer.build(built.trainable_variables)
    assert counts(model) <= counts(whole) / keras_dist.size() + 2 * 128
    everywhere = sum(keras_dist.allgather_object(counts(model)))
    assert everywhere == counts(whole)


def test_without_callbacks_the_first_step_builds_the_slices():
    x, y = make_data(BATCH, seed=keras_dist.rank())
    model, whole = make(Adam(0.01)), make(Adam(0.01), shard_state=False)
    for trained in (model, whole):
        trained.train_on_batch(x, y)
        trained.train_on_batch(x, y)
    assert_same_bits(model, whole)


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

    assert_same_bits(train(True), train(False))


def test_a_saved_model_is_an_ordinary_whole_file(shared_tmp_path):
    model, whole = fit(make(Adam(0.01))), fit(make(Adam(0.01), shard_state=False))
    path = shared_tmp_path / f"{keras_dist.rank()}.keras"
    model.save(path)  # every rank: the state is gathered
    plain = keras.saving.load_model(path)
    for value, wanted in zip(plain.optimizer.variables, whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(to_numpy(value), to_numpy(wanted))
    with zipfile.ZipFile(path) as archive:
        assert "model.weights.h5" in archive.namelist()


def test_a_loaded_model_continues_with_the_bits_of_whole_updates(shared_tmp_path):
    whole = fit(fit(make(Adam(0.01), shard_state=False)))
    path = shared_tmp_path / f"{keras_dist.rank()}.keras"
    fit(make(Adam(0.01))).save(path)
    model = keras_dist.load_model(path)
    assert model.optimizer._keras_dist.options.shard_state
    if keras_dist.size() > 1:
        assert counts(model) < counts(whole)
    assert_same_bits(fit(model), whole)


def test_a_checkpoint_of_the_root_is_whole(shared_tmp_path):
    path = shared_tmp_path / "last.keras"
    model = fit(make(Adam(0.01)), callbacks=[keras_dist.callbacks.ModelCheckpoint(str(path))])
    loaded = keras.saving.load_model(path)
    whole = fit(make(Adam(0.01), shard_state=False))
    assert_same_bits(model, whole)
    for value, wanted in zip(loaded.optimizer.variables, whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(to_numpy(value), to_numpy(wanted))


def test_the_root_alone_may_load_the_state(shared_tmp_path):
    path = shared_tmp_path / "saved.keras"
    whole = fit(fit(make(Adam(0.01), shard_state=False)))
    backup = keras_dist.callbacks.ModelCheckpoint(str(path))
    fit(make(Adam(0.01)), callbacks=[backup])
    is_root = keras_dist.rank() == 0
    model = keras_dist.load_model(path) if is_root else make(Adam(0.01))
    assert_same_bits(fit(model), whole)


@pytest.mark.parametrize("before, after", [(True, True), (True, False), (False, True)])
def test_a_backup_resumes_sharded_or_whole(before, after, shared_tmp_path):
    whole = fit(make(Adam(0.01), shard_state=False), epochs=2)

    class Killed(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    def backup():
        return keras_dist.callbacks.BackupAndRestore(str(shared_tmp_path / "backup"))

    with pytest.raises(KeyboardInterrupt):
        fit(make(Adam(0.01), before), 2, [backup(), Killed()])
    assert_same_bits(fit(make(Adam(0.01), after), 2, [backup()]), whole)


def test_assigned_weights_are_updated():
    def train(shard_state):
        model = fit(make(Adam(0.01), shard_state))
        held = [weight.value for weight in model.weights]  # may be in the memory of all ranks
        model.set_weights([weight + 1 for weight in model.get_weights()])
        fit(model, epochs=2)
        del held
        return model

    assert_same_bits(train(True), train(False))


REFUSED = {
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "LAMB": lambda: keras.optimizers.Lamb(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "LARS": lambda: keras_dist.optimizers.LARS(0.1),
    "a loss scale": lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1)),
    "averages that overwrite weights": lambda: SGD(use_ema=True, ema_overwrite_frequency=2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_updates_are_refused(name):
    with pytest.raises(errors.ArgumentError, match="shard_state"):
        keras_dist.DistributedOptimizer(REFUSED[name](), shard_state=True)


def test_a_custom_update_is_refused():
    class Custom(SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)

    with pytest.raises(errors.ArgumentError, match="Custom"):
        keras_dist.DistributedOptimizer(Custom(0.1), shard_state=True)


def test_local_variables_and_process_sets_are_refused():
    layer = keras.layers.Dense(2)
    with pytest.raises(errors.ArgumentError, match="local variables"):
        keras_dist.PartialDistributedOptimizer(SGD(0.1), local_layers=layer, shard_state=True)
    model = make(SGD(0.1))
    with pytest.raises(errors.ArgumentError, match="local variables"):
        model.optimizer.register_local_var(model.weights[0])
    if keras_dist.size() == 1:
        return  # no other set than that of all ranks
    ranks = keras_dist.add_process_set([0])
    try:
        with pytest.raises(errors.ArgumentError, match="process_set"):
            keras_dist.DistributedOptimizer(SGD(0.1), process_set=ranks, shard_state=True)
    finally:
        keras_dist.remove_process_set(ranks)


def test_a_loss_scale_of_compile_is_refused_before_the_first_step():
    model = make(SGD(0.1))
    model.compile(keras.optimizers.LossScaleOptimizer(model.optimizer), model.loss)
    with pytest.raises(errors.ArgumentError, match="loss scale"):
        fit(model)


@pytest.mark.skipif(keras_dist.size() == 1, reason="one rank cannot differ")
def test_ranks_that_differ_in_shard_state_raise():
    model = make(Adam(0.1), shard_state=keras_dist.rank() == 1)
    with pytest.raises(errors.MismatchError, match="sharded state"):
        fit(model)


def test_the_state_of_elastic_training_is_refused():
    with pytest.raises(errors.ArgumentError, match="shard_state"):
        keras_dist.elastic.KerasState(make(SGD(0.1)))
