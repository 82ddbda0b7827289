"""A resumed fit: callbacks, metrics, optimizers and random numbers go on as without a break."""

import datetime
import inspect
import logging
import unittest.mock

import keras
import numpy as np
import pytest
from gans import TwoOptimizers
from interrupting import Interrupt, Interrupted, everything_of
from small_training import BATCH, distributed, make_data

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import BackupAndRestore, callback_states
from keras_dist.resume.state import Metrics, pack, unpack
from keras_dist.training import random_generators

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")
on_tensorflow_as_well = pytest.mark.jobs("tensorflow-2")

STEPS = 3


@pytest.fixture
def directory(shared_tmp_path):
    """A directory for the backup, which is removed at the end of training."""
    return shared_tmp_path / "backup"


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


def test_training_that_was_stopped_stays_stopped(directory, caplog):
    def make():
        early = keras.callbacks.EarlyStopping("value", patience=1, mode="min")
        return [Values(0.1, 0.2, 0.3), early]

    model, expected = fit(*make(), epochs=3)
    fit(BackupAndRestore(directory, delete_checkpoint=False), *make(), epochs=3)
    with caplog.at_level(logging.WARNING, "keras_dist"):
        again, found = fit(BackupAndRestore(directory), *make(), epochs=3)
    assert expected.epoch == found.epoch == [0, 1]
    assert everything_of(again) == everything_of(model)
    assert caplog.text.count("training was stopped after epoch 2") == (keras_dist.rank() == 0)


@on_tensorflow_as_well
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


def test_a_state_that_a_backup_cannot_hold_is_an_error_on_every_rank(directory):
    last = keras_dist.rank() == keras_dist.size() - 1

    class Odd(Counts):
        def state_dict(self):
            return {"batches": {1, 2}} if last else {}

    with pytest.raises(errors.CheckpointError, match=r"Odd.state_dict\(\).* of type set"):
        fit(BackupAndRestore(directory), Odd(), epochs=1)


def test_a_state_that_a_callback_refuses_is_an_error_on_every_rank(directory):
    last = keras_dist.rank() == keras_dist.size() - 1

    class Refuses(Counts):
        def load_state_dict(self, state):
            if last:
                raise KeyError("sums")

    with pytest.raises(Interrupted):
        fit(BackupAndRestore(directory), Refuses(), Interrupt(1))
    keras_dist.barrier()
    with pytest.raises(errors.CheckpointError, match=r"Refuses.load_state_dict\(\).*KeyError"):
        fit(BackupAndRestore(directory), Refuses())


def test_a_fit_that_fails_while_it_skips_leaves_the_model_as_it_was(directory):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise Interrupted

    expected = everything_of(fit()[0])
    with pytest.raises(Interrupted):
        fit(BackupAndRestore(directory, save_freq=1), Interrupt(1, 1))
    keras_dist.barrier()
    model, fails = new_model(), Fails()
    with pytest.raises(Interrupted):
        fit(BackupAndRestore(directory, save_freq=1), fails, model=model)
    keras_dist.barrier()
    fit(BackupAndRestore(directory, save_freq=1), model=model)
    assert everything_of(model) == expected


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return STEPS * keras_dist.size()

    def __getitem__(self, index):
        return make_data(BATCH, seed=index)


def test_the_order_that_worker_processes_read_goes_on(directory, caplog):
    def train(*callbacks):
        model, data = new_model(), keras_dist.data.shard(Rows(workers=2, use_multiprocessing=True))
        model.fit(data, epochs=3, callbacks=keras_dist.callbacks(*callbacks), verbose=0)
        return everything_of(model)

    expected = train()
    with pytest.raises(Interrupted):
        train(BackupAndRestore(directory, save_freq=1), Interrupt(1, 0))
    with caplog.at_level(logging.WARNING, "keras_dist"):
        assert train(BackupAndRestore(directory, save_freq=1)) == expected
    assert "does not keep" not in caplog.text


def test_what_a_backup_does_not_hold_is_named_once(directory, caplog):
    class Forgets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["took"] = datetime.timedelta(seconds=1)

    class OwnStopping(keras.callbacks.EarlyStopping):
        pass

    callbacks = [
        BackupAndRestore(directory),
        Forgets(),
        OwnStopping("loss", patience=3),
        Counts(),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]
    with caplog.at_level(logging.WARNING, "keras_dist"):
        _, history = fit(*callbacks, epochs=3)
    assert len(history.history["took"]) == 3
    said = [one.getMessage() for one in caplog.records if "does not hold" in one.getMessage()]
    of_callbacks = [text for text in said if "of the callbacks Forgets, OwnStopping. " in text]
    of_history = [text for text in said if "does not hold History.history" in text]
    root_says = keras_dist.rank() == 0
    assert len(of_callbacks) == bool(of_history) == root_says
    assert len(said) == len(of_callbacks) + len(of_history)


STATELESS = {"CSVLogger", "LambdaCallback", "LearningRateScheduler", "ProgbarLogger"}
STATELESS |= {"Callback", "CallbackList", "RemoteMonitor", "TerminateOnNaN"}


def test_what_callbacks_of_keras_keep_has_the_names_that_are_known(monkeypatch):
    kinds = [kind for kind in vars(keras.callbacks).values() if isinstance(kind, type)]
    known = STATELESS | callback_states.STATE_ATTRIBUTES.keys()
    assert {
        kind.__name__ for kind in kinds if issubclass(kind, keras.callbacks.Callback)
    } == known, "add new callbacks to STATE_ATTRIBUTES, or to STATELESS here"
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


def test_a_log_that_rank_0_lacks_is_cut_off_in_a_job_of_another_size(tmp_path):
    log = tmp_path / "log.csv"
    log.write_bytes(b"1.0\n2.0\n")
    logger = keras.callbacks.CSVLogger(str(log))
    [name] = callback_states.acting([logger])
    saved = {name: {"file": {"keys": ["loss"], "nbytes": 4}}}
    states = [{}] + [saved] * keras_dist.size()  # of one rank more
    callback_states.CallbackStates([logger]).take(states)
    assert log.read_bytes() == (b"1.0\n2.0\n" if keras_dist.rank() == 0 else b"1.0\n")


@on_tensorflow_as_well
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


# --- Optimizers that are built late, and random numbers


def new_gan(judging=None, making=None, patience=0):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = TwoOptimizers(patience)
    optimizers = (
        judging or keras.optimizers.Adam(0.01),
        making or keras.optimizers.SGD(0.1, momentum=0.9),
    )
    model.compile(*map(keras_dist.DistributedOptimizer, optimizers), run_eagerly=patience > 0)
    return model


def train(model, *callbacks):
    real, _ = make_data(12, seed=keras_dist.rank())
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, "epochs": 3}
    model.fit(real, callbacks=keras_dist.callbacks(*callbacks), **options)
    keras_dist.verify_replicas(model)
    return everything_of(model)


def interrupt(model, directory, epoch, batch=None, **options):
    with pytest.raises(Interrupted):
        train(model, BackupAndRestore(directory, **options), Interrupt(epoch, batch))
    keras_dist.barrier()


@pytest.mark.long
@on_each_backend
@pytest.mark.parity("`BackupAndRestore` with two optimizers, built at their first steps")
def test_optimizers_that_are_not_built_when_training_resumes(directory):
    expected = train(new_gan())
    interrupt(new_gan(), directory, 1)
    interrupt(new_gan(), directory, 2, batch=1, save_freq=1)
    model = new_gan()
    assert train(model, BackupAndRestore(directory)) == expected
    assert int(model.d_optimizer.iterations) == int(model.g_optimizer.iterations) == 9


def test_only_one_optimizer_has_made_a_step_when_the_backup_is_written(directory):
    def gan():
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 8.0)
        return new_gan(scaled, keras.optimizers.Adagrad(0.1), patience=4)

    expected = train(gan())
    interrupted, built = gan(), gan()
    interrupt(interrupted, directory, 1, batch=2)  # after two steps of the second
    built.g_optimizer.build(built.maker.trainable_variables)
    for model in (gan(), built, interrupted):
        with pytest.raises(Interrupted):
            train(model, BackupAndRestore(directory, save_freq=100), Interrupt(2))
        keras_dist.barrier()
        assert int(model.g_optimizer.iterations) == 2
    assert train(built, BackupAndRestore(directory)) == expected


def test_optimizers_that_one_rank_has_built_are_built_on_all():
    model = new_gan()
    if keras_dist.rank() == keras_dist.size() - 1:
        model.d_optimizer.build(model.judge.trainable_variables)
    assert train(model) == train(new_gan())


def test_an_elastic_state_of_optimizers_that_are_built_after_it(directory):
    model = new_gan()
    state = keras_dist.elastic.KerasState(model, directory=directory)
    start = model.get_weights()
    expected = train(model)
    state.restore()
    assert all((a == b).all() for a, b in zip(start, model.get_weights(), strict=True))
    assert all(int(one.iterations) == 0 for one in (model.d_optimizer, model.g_optimizer))
    assert not any(np.any(one) for one in model.g_optimizer.momentums)
    assert train(model) != expected  # its dropout has advanced
    state.save()
    expected = everything_of(model)
    keras_dist.barrier()
    fresh = new_gan()
    keras_dist.elastic.KerasState(fresh, directory=directory).sync()
    assert everything_of(fresh) == expected


@on_tensorflow_as_well
def test_the_generator_that_keras_shares_goes_on():
    def draw():
        return keras.ops.convert_to_numpy(keras.random.uniform((2,))).tolist()

    keras.utils.set_random_seed(1)
    draw()
    states = random_generators.states()
    expected = draw()
    random_generators.restore(states)
    assert draw() == expected
