"""A resumed fit: callbacks, metrics and learning rates continue as without an interruption."""

import datetime
import inspect
import logging
import unittest.mock

import keras
import numpy as np
import pytest
from test_backup import Interrupt, Interrupted, everything_of
from training import BATCH, agreed, distributed, make_data

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import (
    BackupAndRestore,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    callback_states,
    rank_states,
)
from keras_dist.callbacks.nested_values import pack, unpack

pytestmark = pytest.mark.jobs("training")

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


class Statistics(keras.callbacks.Callback):
    """Records the moving statistics of this rank after each batch of the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.found = {}

    def on_train_batch_end(self, batch, logs=None):
        weights = self.model.non_trainable_weights
        self.found[batch] = [keras.ops.convert_to_numpy(weight).tobytes() for weight in weights]


def new_model(optimizer=None, graph=False, regularised=False):
    """A model that runs eagerly on TensorFlow, unless tracing is tested: tracing takes longest."""
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    eagerly = not graph and keras.backend.backend() == "tensorflow"
    return distributed(optimizer, regularised, metrics=["accuracy"], run_eagerly=eagerly)


def fit(
    *callbacks,
    behind=(),
    epochs=2,
    optimizer=None,
    model=None,
    graph=False,
    regularised=False,
    **options,
):
    """Trains on different samples on each rank; returns the model and its history."""
    model = model or new_model(optimizer, graph, regularised)
    x, y = make_data(STEPS * BATCH, seed=keras_dist.rank())
    callbacks = [*keras_dist.callbacks(*callbacks), *behind]
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **options}
    history = model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)
    keras_dist.verify_replicas(model)
    return model, history


def resumed(directory, epoch, batch, make, save_freq=1, **options):
    """The same, interrupted once; `make` makes the callbacks of each attempt."""
    with pytest.raises(Interrupted):
        backup = BackupAndRestore(directory, save_freq=save_freq)
        fit(backup, *make(), Interrupt(epoch, batch), **options)
    keras_dist.barrier()
    return fit(BackupAndRestore(directory, save_freq=save_freq), *make(), **options)


@pytest.mark.parametrize("at", [(2, None), (2, 1)])
def test_callbacks_go_on_with_what_they_have_seen(at, shared_tmp_path):
    def make(folder):
        path = shared_tmp_path / folder
        if keras_dist.rank() == 0:
            path.mkdir(exist_ok=True)
        keras_dist.barrier()
        log = keras.callbacks.CSVLogger(path / "log.csv")
        return [
            Values(0.5, 0.1, 0.5, 0.4, 0.3, 0.2),
            keras.callbacks.EarlyStopping(
                "value", patience=2, mode="min", restore_best_weights=True
            ),
            keras.callbacks.ReduceLROnPlateau("value", factor=0.5, patience=1, mode="min"),
            keras_dist.callbacks.ModelCheckpoint(
                path / "best.weights.h5",
                "value",
                save_best_only=True,
                save_weights_only=True,
                mode="min",
            ),
            keras_dist.callbacks.RootOnly(log),
        ]

    model, expected = fit(*make("whole"), epochs=6)
    again, found = resumed(
        shared_tmp_path / "backup",
        *at,
        lambda: make("resumed"),
        save_freq="epoch" if at[1] is None else 1,
        epochs=6,
    )
    assert expected.epoch == [0, 1, 2, 3]
    assert (found.epoch, found.history) == (expected.epoch, expected.history)
    assert everything_of(again) == everything_of(model)
    kept = [shared_tmp_path / name for name in ("whole", "resumed")]
    whole, other = ((path / "log.csv").read_text() for path in kept)
    assert whole == other and whole.count("epoch") == 1
    model.load_weights(kept[0] / "best.weights.h5")
    again.load_weights(kept[1] / "best.weights.h5")
    assert everything_of(again) == everything_of(model)


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


@pytest.mark.jobs("tensorflow-1", "jax-2", "equality")
@pytest.mark.parity(
    "a resumed epoch: equal learning rates at batches, batch numbers, metrics and moving statistics"
)
def test_every_batch_of_an_epoch_resumes_to_the_bit(shared_tmp_path):
    made = []

    def make():
        made[:] = [Counts(), Statistics()]
        # From 0, which would zero a velocity that is scaled with the rate.
        ramp = LearningRateScheduleCallback(
            0.2, lambda epoch: abs(epoch - 1), staircase=False, steps_per_epoch=STEPS
        )
        falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
        return [ramp, falling, *made]

    model, expected = fit(*make(), graph=True, regularised=True)
    counts, statistics = made
    assert keras_dist.size() == 1 or not agreed(statistics.found)
    for batch in range(STEPS):
        folder = shared_tmp_path / f"backup {batch}"
        again, found = resumed(folder, 1, batch, make, graph=True, regularised=True)
        assert everything_of(again) == everything_of(model), batch
        assert found.history == expected.history, batch
        assert made[0].batches == counts.batches == 2 * list(range(STEPS))
        assert made[0].sums == counts.sums
        later = range(batch + 1, STEPS)
        assert made[1].found == {number: statistics.found[number] for number in later}


def test_a_warmup_resumes_to_the_bit_within_an_epoch(shared_tmp_path):
    def make():
        return [LearningRateWarmupCallback(0.2, 2, steps_per_epoch=STEPS)]

    model, _ = fit(*make())
    again, _ = resumed(shared_tmp_path / "backup", 1, 1, make)
    assert everything_of(again) == everything_of(model)


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
        {"metrics": [np.float32(rank + place) for place in range(len(names))]}
        for rank in range(keras_dist.size() + 1)
    ]
    model.reset_metrics()
    assert rank_states.restore_metrics(model, states)
    mine = [keras.ops.convert_to_numpy(one) for one in model.metrics_variables]
    totals = keras_dist.allreduce(np.array(mine), op=keras_dist.Sum)
    wanted = np.sum([each["metrics"] for each in states], axis=0)
    np.testing.assert_array_equal(totals[:-1], wanted[:-1])
    assert totals[-1] == states[-1]["metrics"][-1]  # a maximum


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

    with pytest.raises(errors.CheckpointError, match=r"Refuses.load_state_dict\(\).*KeyError"):
        resumed(shared_tmp_path / "backup", 1, 1, lambda: [Refuses()])


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


def test_callbacks_whose_state_is_lost_are_named_once(shared_tmp_path, caplog):
    class Forgets(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(logs["loss"])

    class NotesTheEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    class OwnStopping(keras.callbacks.EarlyStopping):
        pass

    callbacks = [
        BackupAndRestore(shared_tmp_path / "backup"),
        Forgets(),
        NotesTheEpoch(),
        OwnStopping("loss", patience=3),
        Counts(),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]
    with caplog.at_level(logging.WARNING, "keras_dist"):
        fit(*callbacks, epochs=3)
    said = [one.getMessage() for one in caplog.records if "does not hold" in one.getMessage()]
    assert [text.split("callback ")[1].split(",")[0] for text in said] == (
        ["Forgets (seen)"] if keras_dist.rank() == 0 else []
    )


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
