"""A resumed fit: callbacks, metrics and learning rates continue as without an interruption."""

import datetime
import inspect
import logging
import unittest.mock

import keras
import numpy as np
import pytest
from interrupting import Interrupt, Interrupted, everything_of
from small_training import BATCH, distributed, make_data

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import (
    BackupAndRestore,
    callback_states,
)
from keras_dist.resume.state import Metrics, pack, unpack

pytestmark = pytest.mark.jobs("hooks")

STEPS = 3


class Values(keras.callbacks.Callback):
    """Adds a value to the logs of each epoch."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs["value"] = self.values[epoch]


class Counts(keras.callbacks.Callback):
    """Has `state_dict` and `load_state_dict`."""

    def __init__(self):
        super().__init__()
        self.batches, self.sums = [], {"loss": np.zeros(1)}

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.sums["loss"] = self.sums["loss"] + logs["loss"]

    def state_dict(self):
        return {"batches": self.batches, "sums": self.sums}

    def load_state_dict(self, state):
        self.batches, self.sums = state["batches"], state["sums"]


def new_model():
    eagerly = keras.backend.backend() == "tensorflow"  # tracing takes longest
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return distributed(optimizer, metrics=["accuracy"], run_eagerly=eagerly)


def fit(*callbacks, epochs=2, model=None):
    """Trains on different samples on each rank; returns the model and its history."""
    model = model or new_model()
    x, y = make_data(STEPS * BATCH, seed=keras_dist.rank())
    callbacks = keras_dist.callbacks(*callbacks)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)
    keras_dist.verify_replicas(model)
    return model, history


def test_training_that_was_stopped_stays_stopped(shared_tmp_path, caplog):
    def make():
        early = keras.callbacks.EarlyStopping("value", patience=1, mode="min")
        return [Values(0.1, 0.2, 0.3), early]

    model, expected = fit(*make(), epochs=3)
    folder = shared_tmp_path / "backup"
    fit(BackupAndRestore(folder, delete_checkpoint=False), *make(), epochs=3)
    with caplog.at_level(logging.WARNING, "keras_dist"):
        again, found = fit(BackupAndRestore(folder), *make(), epochs=3)
    assert expected.epoch == found.epoch == [0, 1]
    assert everything_of(again) == everything_of(model)
    assert caplog.text.count("training was stopped after epoch 2") == (keras_dist.rank() == 0)


def test_steps_that_are_executed_together_resume_as_well(shared_tmp_path):
    if keras.backend.backend() == "torch":
        pytest.skip("Keras on torch has no steps_per_execution")

    def train(*callbacks):
        model = distributed(metrics=["accuracy"], steps_per_execution=3)
        x, y = make_data(4 * BATCH, seed=keras_dist.rank())  # the last execution has one step
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        callbacks = keras_dist.callbacks(*callbacks)
        history = model.fit(x, y, epochs=2, callbacks=callbacks, **options)
        return everything_of(model), history.history

    expected = train()
    for last in (2, 5):
        folder = shared_tmp_path / f"backup {last}"
        with pytest.raises(Interrupted):
            train(BackupAndRestore(folder, save_freq=1), Interrupt(1, last))
        keras_dist.barrier()
        assert train(BackupAndRestore(folder)) == expected


def test_metrics_keep_their_totals_with_another_number_of_ranks():
    model = distributed(metrics=["accuracy"])
    model.most = keras_dist.metrics.merge(keras.metrics.Sum("most"), "max")
    x, y = make_data(BATCH)
    model.train_on_batch(x, y)
    names = [variable.name for variable in model.metrics_variables]
    states = [
        [np.float32(rank + place) for place in range(len(names))]
        for rank in range(keras_dist.size() + 1)
    ]
    model.reset_metrics()
    assert Metrics(model).take(states)
    mine = [keras.ops.convert_to_numpy(one) for one in model.metrics_variables]
    totals = keras_dist.allreduce(np.array(mine), op=keras_dist.Sum)
    wanted = np.sum(states, axis=0)
    np.testing.assert_array_equal(totals[:-1], wanted[:-1])
    assert totals[-1] == states[-1][-1]  # a maximum


def test_a_state_that_a_backup_cannot_hold_is_an_error_on_every_rank(shared_tmp_path):
    last = keras_dist.rank() == keras_dist.size() - 1

    class Odd(Counts):
        def state_dict(self):
            return {"batches": {1, 2}} if last else {}

    with pytest.raises(errors.CheckpointError, match=r"Odd.state_dict\(\).* of type set"):
        fit(BackupAndRestore(shared_tmp_path / "backup"), Odd(), epochs=1)


def test_a_state_that_a_callback_refuses_is_an_error_on_every_rank(shared_tmp_path):
    last = keras_dist.rank() == keras_dist.size() - 1

    class Refuses(Counts):
        def load_state_dict(self, state):
            if last:
                raise KeyError("sums")

    folder = shared_tmp_path / "backup"
    with pytest.raises(Interrupted):
        fit(BackupAndRestore(folder), Refuses(), Interrupt(1))
    keras_dist.barrier()
    with pytest.raises(errors.CheckpointError, match=r"Refuses.load_state_dict\(\).*KeyError"):
        fit(BackupAndRestore(folder), Refuses())


def test_a_history_that_a_backup_cannot_hold_begins_anew(shared_tmp_path, caplog):
    class Tells(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["took"] = datetime.timedelta(seconds=1)

    with caplog.at_level(logging.WARNING, "keras_dist"):
        _, history = fit(BackupAndRestore(shared_tmp_path / "backup"), Tells(), epochs=2)
    assert len(history.history["took"]) == 2
    root_says = keras_dist.rank() == 0
    assert ("does not hold History.history" in caplog.text) == root_says


def test_a_fit_that_fails_while_it_skips_leaves_the_model_as_it_was(shared_tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise Interrupted

    folder = shared_tmp_path / "backup"
    expected = everything_of(fit()[0])
    with pytest.raises(Interrupted):
        fit(BackupAndRestore(folder, save_freq=1), Interrupt(1, 1))
    keras_dist.barrier()
    model, fails = new_model(), Fails()
    with pytest.raises(Interrupted):
        fit(BackupAndRestore(folder, save_freq=1), fails, model=model)
    keras_dist.barrier()
    fit(BackupAndRestore(folder, save_freq=1), model=model)
    assert everything_of(model) == expected


def test_callbacks_that_give_no_state_are_named_in_one_warning(shared_tmp_path, caplog):
    class Forgets(keras.callbacks.Callback):
        pass

    class OwnStopping(keras.callbacks.EarlyStopping):
        pass

    callbacks = [
        BackupAndRestore(shared_tmp_path / "backup"),
        Forgets(),
        OwnStopping("loss", patience=3),
        Counts(),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]
    with caplog.at_level(logging.WARNING, "keras_dist"):
        fit(*callbacks, epochs=3)
    said = [one.getMessage() for one in caplog.records if "does not hold" in one.getMessage()]
    assert len(said) == (keras_dist.rank() == 0)
    assert all("of the callbacks Forgets, OwnStopping. " in text for text in said)


STATELESS = {"CSVLogger", "LambdaCallback", "LearningRateScheduler", "ProgbarLogger"}
STATELESS |= {"Callback", "CallbackList", "RemoteMonitor", "TerminateOnNaN"}


def test_every_callback_of_keras_is_known():
    kinds = [kind for kind in vars(keras.callbacks).values() if isinstance(kind, type)]
    known = STATELESS | callback_states.STATE_ATTRIBUTES.keys()
    assert {
        kind.__name__ for kind in kinds if issubclass(kind, keras.callbacks.Callback)
    } == known, "add new callbacks to STATE_ATTRIBUTES, or to STATELESS here"


def test_what_keras_callbacks_keep_has_the_names_that_are_known(monkeypatch):
    made = {
        "BackupAndRestore": keras.callbacks.BackupAndRestore("directory"),
        "EarlyStopping": keras.callbacks.EarlyStopping(),
        "History": keras.callbacks.History(),
        "ModelCheckpoint": keras.callbacks.ModelCheckpoint("model.keras"),
        "ReduceLROnPlateau": keras.callbacks.ReduceLROnPlateau(),
        "SwapEMAWeights": keras.callbacks.SwapEMAWeights(),
        "TensorBoard": keras.callbacks.TensorBoard(),
    }
    if "OrbaxCheckpoint" in callback_states.STATE_ATTRIBUTES:
        kind = keras.callbacks.OrbaxCheckpoint
        monkeypatch.setattr(inspect.getmodule(kind), "ocp", unittest.mock.MagicMock())
        made["OrbaxCheckpoint"] = kind("directory")
    made["EarlyStopping"].on_train_begin()
    made["History"].on_train_begin()
    for kind, names in callback_states.STATE_ATTRIBUTES.items():
        assert set(names) <= vars(made[kind]).keys(), kind


def test_nested_values_come_back_as_they_were():
    value = {
        "plain": [None, True, 3, 0.1, float("inf"), "text"],
        "arrays": (np.arange(6, dtype=">i2").reshape(2, 3), np.float32(0.1), np.zeros((0, 2))),
        3: {"inner": {"deep": [np.array("text"), np.bool_(True)]}},
    }
    arrays = []
    found = unpack(pack(value, arrays), arrays)
    assert repr(found) == repr(value)
    [tensor] = unpack(pack([keras.ops.ones(3, "bfloat16")], arrays), arrays)
    assert keras.ops.is_tensor(tensor)
    assert keras.backend.standardize_dtype(tensor.dtype) == "bfloat16"
    for odd in (object(), {1, 2}, np.array([object()]), {(1,): 2}):
        with pytest.raises(TypeError):
            pack(odd, arrays)
