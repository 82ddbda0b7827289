"""Interrupted training resumes and ends like uninterrupted training."""

import keras
import pytest
from interrupting import Interrupt, Interrupted, everything_of
from small_training import (
    CLASSES,
    FEATURES,
    assert_close,
    compiled,
    make_data,
    make_model,
    weights_of,
)

import keras_dist
from keras_dist.callbacks import BackupAndRestore, ShardedCheckpoint

# The code of keras_dist is the same on every backend: others run what docs/backends.md shows.
pytestmark = pytest.mark.jobs("torch-2")


def new_model(optimizer=None, **options):
    optimizer = keras_dist.DistributedOptimizer(optimizer or keras.optimizers.Adam(0.01))
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.4, seed=3),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ]
    return compiled(keras.Sequential(layers), optimizer, **options)


def fit(*callbacks, model=None, epochs=3, **data):
    model = model or new_model(run_eagerly=True)
    if not data:
        x, y = make_data(8, seed=keras_dist.rank())
        data = {"x": x, "y": y, "batch_size": 4, "shuffle": False}
    trained = []
    notes = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: trained.append(epoch))
    callbacks = keras_dist.callbacks(*callbacks, notes)
    history = model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks)
    keras_dist.verify_replicas(model)
    assert history.epoch == list(range(epochs))
    return model, trained


@pytest.fixture
def directory(shared_tmp_path):
    """A directory for the backup, which is removed at the end of training."""
    return shared_tmp_path / "backup"


@pytest.mark.long
@pytest.mark.parity("`BackupAndRestore`: resumed training equals uninterrupted training")
@pytest.mark.parametrize(
    "shared", [pytest.param(True, marks=pytest.mark.jobs("hooks", "jax-2", "equality")), False]
)
def test_resumed_training_equals_training_that_was_not_interrupted(shared, shared_tmp_path):
    directory = shared_tmp_path / ("backup" if shared else f"backup of {keras_dist.rank()}")

    def model():
        return new_model(run_eagerly=not shared)

    expected, _ = fit(model=model())
    with pytest.raises(Interrupted):
        fit(BackupAndRestore(directory), Interrupt(2), model=model())
    assert directory.exists() == (shared or keras_dist.rank() == 0)
    keras_dist.barrier()
    keras.utils.clear_session()
    again, epochs = fit(BackupAndRestore(directory), model=model())
    assert epochs == [2]
    assert everything_of(again) == everything_of(expected)
    keras_dist.barrier()
    assert not directory.exists()


@pytest.mark.parametrize(
    ("kind", "at"),  # after 2 and 4 of 3 + 3 passes
    [
        pytest.param(BackupAndRestore, (0, 1), marks=pytest.mark.jobs("tensorflow-2", "jax-2")),
        (ShardedCheckpoint, (1, 1)),
    ],
)
def test_training_resumes_between_the_passes_of_an_update(kind, at, shared_tmp_path):
    x, y = make_data(12, seed=keras_dist.rank())

    def train(*callbacks):
        optimizer = keras.optimizers.SGD(0.1)
        model = make_model(keras_dist.DistributedOptimizer(optimizer, backward_passes_per_step=3))
        callbacks = keras_dist.callbacks(*callbacks)
        options = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        model.fit(x, y, epochs=2, **options)
        keras_dist.verify_replicas(model)
        return model

    whole = train(kind(shared_tmp_path / "whole", save_freq=1))
    with pytest.raises(Interrupted):
        train(kind(shared_tmp_path / "backup", save_freq=1), Interrupt(*at))
    keras_dist.barrier()
    model = train(kind(shared_tmp_path / "backup", save_freq=1))
    assert everything_of(model) == everything_of(whole)
    assert_close(weights_of(model), weights_of(train()))


@pytest.mark.parametrize("is_link", [False, True])
def test_the_model_itself_starts_anew_once_it_is_done(directory, is_link):
    if is_link and keras_dist.rank() == 0:  # as to a larger file system
        directory.with_name("elsewhere").mkdir()
        directory.symlink_to("elsewhere")
    model = new_model(run_eagerly=True)
    with pytest.raises(Interrupted):
        fit(BackupAndRestore(directory), Interrupt(1), model=model)
    assert fit(BackupAndRestore(directory), model=model)[1] == [1, 2]
    assert fit(BackupAndRestore(directory), model=model)[1] == [0, 1, 2]
