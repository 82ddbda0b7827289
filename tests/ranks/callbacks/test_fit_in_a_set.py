"""Trials on process sets train side by side: each set averages, stops and saves by itself."""

import threading

import keras
import numpy as np
import pytest
from interrupting import Interrupt, Interrupted
from small_training import assert_close, make_data, make_model, weights_of

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import BackupAndRestore, ModelCheckpoint, ShardedCheckpoint

SGD = keras.optimizers.SGD

# On two ranks, each has a set of its own. One of three ranks trains alone.
pytestmark = pytest.mark.jobs("torch-3")
on_all_backends = pytest.mark.jobs("tensorflow-2", "jax-2")

BATCH, STEPS = 4, 3


@pytest.fixture
def trial():
    """The set of this rank; the ranks are split into two."""
    size = keras_dist.size()
    if size == 1:
        pytest.skip("a job of one rank has no two sets")
    half = (size + 1) // 2
    sets = [keras_dist.add_process_set(list(r)) for r in (range(half), range(half, size))]
    yield next(each for each in sets if each.included())
    keras_dist.barrier()
    for each in sets:
        keras_dist.remove_process_set(each)


def rate_of(trial):
    return 0.1 * (1 + trial.ranks[0])


def data_of(trial):
    """The data of the trial, and the rows of this rank, without one batch on its last rank."""
    count = trial.size()
    x, y = make_data(BATCH * STEPS * count, seed=trial.ranks[0])
    batches = x.reshape(STEPS, count, BATCH, -1), y.reshape(STEPS, count, BATCH)
    own = [each[:, trial.rank()].reshape(STEPS * BATCH, *each.shape[3:]) for each in batches]
    return (x, y), own


def model_of(trial, **options):
    sgd = SGD(rate_of(trial), momentum=0.9)
    return make_model(keras_dist.DistributedOptimizer(sgd, process_set=trial), **options)


def fit(model, data, trial, *callbacks, epochs=2, appended=(), **options):
    callbacks = [*keras_dist.callbacks(*callbacks, process_set=trial), *appended]
    options = {"validation_data": data_of(trial)[0], "shuffle": False, "verbose": 0, **options}
    return model.fit(*data, batch_size=BATCH, epochs=epochs, callbacks=callbacks, **options)


@on_all_backends
@pytest.mark.jobs("torch-4")
@pytest.mark.parity("trials on process sets train side by side, each like one process")
def test_each_set_trains_like_one_process(trial):
    whole, own = data_of(trial)
    epochs = 2 + trial.ranks[0]  # the sets do not wait for each other
    model = model_of(trial, metrics=["accuracy"])
    if trial.rank() == 1:
        model.set_weights([weight + 1 for weight in weights_of(model)])
    history = fit(model, own, trial, epochs=epochs).history
    alone = make_model(SGD(rate_of(trial), momentum=0.9), metrics=["accuracy"])
    options = {"validation_data": whole, "shuffle": False, "verbose": 0}
    expected = alone.fit(*whole, BATCH * trial.size(), epochs, **options).history
    assert_close(weights_of(model), weights_of(alone))
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)
    callbacks = keras_dist.callbacks(process_set=trial)
    found = model.evaluate(*own, batch_size=BATCH, verbose=0, callbacks=callbacks)
    np.testing.assert_allclose(found, alone.evaluate(*whole, verbose=0), rtol=1e-4)
    assert keras_dist.allgather_object(1) == [1] * keras_dist.size()
    shard = keras_dist.data.shard(whole, BATCH, shuffle=False, process_set=trial)
    model = model_of(trial, metrics=["accuracy"])
    model.fit(shard, epochs=epochs, verbose=0, callbacks=keras_dist.callbacks(process_set=trial))
    assert_close(weights_of(model), weights_of(alone))


def test_a_set_ends_with_the_last_of_its_ranks(trial):
    rows = BATCH * STEPS - BATCH * (trial.rank() == trial.size() - 1 > 0)
    _, own = data_of(trial)
    model = model_of(trial)
    fit(model, [each[:rows] for each in own], trial)
    bits = b"".join(weight.tobytes() for weight in weights_of(model))
    assert len(set(keras_dist.allgather_object(bits, process_set=trial))) == 1
    assert int(model.optimizer.iterations) == 2 * STEPS


class StopAt(keras.callbacks.Callback):
    """Stops at the end of a batch, on the last rank of a set."""

    def __init__(self, trial, batch):
        super().__init__()
        self.trial, self.batch = trial, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and self.trial.rank() == self.trial.size() - 1:
            self.model.stop_training = True


def test_a_set_resumes_from_its_own_checkpoint(trial, shared_tmp_path):
    _, own = data_of(trial)
    folder = shared_tmp_path / str(trial.ranks[0])
    whole = model_of(trial)
    fit(whole, own, trial)
    model = model_of(trial)
    with pytest.raises(Interrupted):
        fit(model, own, trial, ShardedCheckpoint(folder, save_freq=1), Interrupt(1, 1))
    model = model_of(trial)
    saved = folder.with_suffix(".weights.h5")
    checkpoint = ModelCheckpoint(str(saved), save_weights_only=True)
    fit(model, own, trial, ShardedCheckpoint(folder, save_freq=1), checkpoint)
    assert [w.tobytes() for w in weights_of(model)] == [w.tobytes() for w in weights_of(whole)]
    assert saved.exists()


def loop(model, data, trial, *callbacks):
    """Trains two epochs in a loop of one's own; returns the loss of the evaluation after each."""
    listed = keras_dist.callbacks(*callbacks, process_set=trial)
    losses, listed = [], keras.callbacks.CallbackList(listed, model=model)
    listed.on_train_begin()
    for epoch in range(2):
        listed.on_epoch_begin(epoch)
        for step in range(STEPS):
            batch = [each[step * BATCH : (step + 1) * BATCH] for each in data]
            listed.on_train_batch_begin(step)
            listed.on_train_batch_end(step, model.train_on_batch(*batch, return_dict=True))
            if model.stop_training:
                break
        losses.append(model.evaluate(*data, batch_size=BATCH, verbose=0, callbacks=listed))
        listed.on_epoch_end(epoch)
        if model.stop_training:
            break
    listed.on_train_end()
    return losses


def test_a_loop_of_ones_own_acts_within_the_set(trial, shared_tmp_path):
    (x, y), own = data_of(trial)
    folder, file = shared_tmp_path / str(trial.ranks[0]), f"{trial.ranks[0]}.weights.h5"
    checkpoint = ModelCheckpoint(str(shared_tmp_path / file), save_weights_only=True)
    model = model_of(trial)
    model.set_weights([weight + trial.rank() for weight in weights_of(model)])
    of_one_set = [ShardedCheckpoint(folder)] if trial.ranks[0] else []
    losses = loop(model, own, trial, checkpoint, *of_one_set)
    assert (checkpoint.root_rank, checkpoint.process_set) == (0, None)
    alone, expected = make_model(SGD(rate_of(trial), momentum=0.9)), []
    for _ in range(2):
        alone.fit(x, y, BATCH * trial.size(), verbose=0, shuffle=False)
        expected.append(alone.evaluate(x, y, verbose=0))
    assert_close(weights_of(model), weights_of(alone))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    saved = model_of(trial)
    saved.load_weights(shared_tmp_path / file)
    assert_close(weights_of(saved), weights_of(alone))
    assert keras_dist.allgather_object(1) == [1] * keras_dist.size()


@pytest.mark.parametrize("how", ["listed", "appended", "in a loop"])
def test_a_stop_stops_one_set(trial, how):
    model, own = model_of(trial), data_of(trial)[1]
    stops = [StopAt(trial, 1)] if trial.ranks[0] == 0 else []
    if how == "listed":
        fit(model, own, trial, *stops)
    elif how == "appended":
        fit(model, own, trial, appended=stops)
    else:
        loop(model, own, trial, *stops)
    assert int(model.optimizer.iterations) == (2 if trial.ranks[0] == 0 else 2 * STEPS)


def test_a_callback_of_the_user_may_then_train_on_all_ranks(trial, shared_tmp_path):
    _, own = data_of(trial)
    backup = BackupAndRestore(shared_tmp_path / "backup" / str(trial.ranks[0]))
    fit(model_of(trial), own, trial, backup, epochs=1)
    assert (backup.root_rank, backup.process_set) == (0, None)
    model = make_model(keras_dist.DistributedOptimizer(SGD(0.1)))
    model.fit(*own, batch_size=BATCH, verbose=0, callbacks=keras_dist.callbacks(backup))
    assert len(set(keras_dist.allgather_object(weights_of(model)[0].tobytes()))) == 1


class Calls(keras.callbacks.Callback):
    """Calls functions at the begin of training."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def on_train_begin(self, logs=None):
        for function in self.functions:
            function()


@on_all_backends
def test_fits_of_two_threads_have_ranks_of_their_own(trial):
    _, own = data_of(trial)
    begun, goes_on = threading.Event(), threading.Event()
    waits = Calls(begun.set, lambda: goes_on.wait(100))
    beside, everywhere = model_of(trial), make_model(keras_dist.DistributedOptimizer(SGD(0.1)))
    thread = threading.Thread(target=fit, args=(beside, own, trial), kwargs={"appended": [waits]})
    starts = Calls(thread.start, lambda: begun.wait(100))
    callbacks = keras_dist.callbacks(starts)
    everywhere.fit(*own, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    goes_on.set()
    thread.join(100)
    assert not thread.is_alive()
    keras_dist.verify_replicas(everywhere)
    alone = model_of(trial)
    fit(alone, own, trial)
    assert_close(weights_of(beside), weights_of(alone))


def test_errors_tell_the_progress_of_their_own_fit(trial):
    _, own = data_of(trial)
    found = []
    differs = Calls(lambda: trial.rank() == 1 and keras_dist.allreduce([0.0], process_set=trial))

    def train():
        try:
            fit(model_of(trial), own, trial, appended=[differs])
        except errors.MismatchError as error:
            found.append(str(error))

    thread = threading.Thread(target=train)
    everywhere = make_model(keras_dist.DistributedOptimizer(SGD(0.1)))
    callbacks = keras_dist.callbacks(Calls(thread.start, lambda: thread.join(100)))
    everywhere.fit(*own, batch_size=BATCH, verbose=0, callbacks=callbacks)
    assert not thread.is_alive()
    assert len(found) == (trial.size() > 1)
    first, second = trial.ranks[0], trial.ranks[-1]
    for text in found:
        assert f"Rank {first} is in fit, epoch 1, rank {second} in fit." in text


def test_what_a_set_cannot_do_is_refused_before_the_first_step(trial):
    _, own = data_of(trial)
    everywhere = make_model(keras_dist.DistributedOptimizer(SGD(0.1)))
    with pytest.raises(errors.ArgumentError, match="averages over the ranks of the callbacks"):
        fit(everywhere, own, trial)
    with pytest.raises(errors.ArgumentError, match="on_failure='stop' with a process_set"):
        keras_dist.callbacks(process_set=trial, on_failure="continue")
    with pytest.raises(errors.ArgumentError, match="keeps copies of the job in memory"):
        keras_dist.callbacks(BackupAndRestore("b", memory=True), process_set=trial)
    with pytest.raises(errors.ArgumentError, match="commits the state of all ranks"):
        keras_dist.callbacks(keras_dist.elastic.CommitStateCallback(None), process_set=trial)
    other = next(rank for rank in range(keras_dist.size()) if rank not in trial.ranks)
    if other:
        with pytest.raises(errors.ArgumentError, match="root_rank to be a rank of the process set"):
            keras_dist.callbacks(process_set=trial, root_rank=other)
    assert int(everywhere.optimizer.iterations) == 0
