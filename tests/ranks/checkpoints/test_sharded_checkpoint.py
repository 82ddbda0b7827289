"""`ShardedCheckpoint`: every rank writes a part, and any number of ranks reads the whole."""

import os
import threading
import time

import keras
import numpy as np
import pytest
from interrupting import Interrupt, Interrupted
from small_training import CLASSES, FEATURES, agreed, compiled, make_data

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import ShardedCheckpoint
from keras_dist.resume import format, tensor_file
from keras_dist.resume.read import Contents
from keras_dist.resume.variables import pieces_of_rank
from keras_dist.training import model_state
from keras_dist.training.session_callback import SessionCallback
from keras_dist.training.sharded_state import whole_value

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")
where_arrays_are_elsewhere = pytest.mark.jobs("tensorflow-2", "training-double-torch-2")

BATCH, STEPS = 4, 3


def make(shard_state=True, run_eagerly=True):
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(301, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=3),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ]
    adam = keras.optimizers.Adam(0.01)
    wrapped = keras_dist.DistributedOptimizer(adam, shard_state=shard_state)
    return compiled(keras.Sequential(layers), wrapped, run_eagerly=run_eagerly)


def fit(model, *callbacks, epochs=1):
    x, y = make_data(STEPS * BATCH, seed=keras_dist.rank())
    trained = []
    notes = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: trained.append(epoch))
    callbacks = keras_dist.callbacks(*callbacks, notes)
    model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return trained


def everything_of(model):
    """Returns the bytes of the whole state. Collective."""
    return [whole_value(variable).tobytes() for variable in model_state.state(model)]


@pytest.fixture
def directory(shared_tmp_path):
    return shared_tmp_path / "checkpoints"


def test_ranks_write_equal_shares_and_old_generations_go(directory):
    fit(make(), ShardedCheckpoint(directory, keep=2), epochs=3)
    keras_dist.barrier()
    found = sorted(path.name for path in directory.iterdir())
    assert len(found) == 4 and found[0] == "00000002" and found[2] == "00000003"
    parts = format.parts_of(directory, 3, keras_dist.size())
    assert len(parts) == keras_dist.size()
    assert len([*(directory / "00000003").iterdir()]) == keras_dist.size()
    sizes = [sum(each.nbytes for each in numbers_of(path).values()) for path in parts]
    assert max(sizes) <= sum(sizes) / len(sizes) + 16 * 512  # see `FusedAllgather`


def numbers_of(path):
    """Returns the pieces of variables in a part."""
    return {n: entry for n, entry in tensor_file.read_header(path).items() if ":" in n}


def test_one_keras_file_is_exported(directory, tmp_path):
    model = make()
    fit(model, ShardedCheckpoint(directory))
    expected = everything_of(model)
    keras_dist.barrier()
    keras_dist.checkpoints.export(directory, tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer).__name__ == "Adam"
    assert not hasattr(plain.optimizer, "_keras_dist")
    assert [v.tobytes() for v in map(model_state.to_numpy, model_state.state(plain))] == expected
    again = make(shard_state=False)
    keras_dist.checkpoints.export(directory, tmp_path / "other.keras", model=again)
    assert everything_of(again) == expected


@where_arrays_are_elsewhere
def test_a_checkpoint_is_loaded_without_fit(directory):
    model, other = make(), make()
    fit(model, ShardedCheckpoint(directory), epochs=2)
    keras_dist.barrier()
    other.optimizer.learning_rate = 7.0
    assert keras_dist.checkpoints.load(other, directory) == 2
    assert everything_of(other) == everything_of(model)
    fit(other)
    fit(model)
    assert everything_of(other)[0] == everything_of(model)[0]


class Hold(SessionCallback):
    """Lets a write go on when the second epoch has begun."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.event, self.waited, write = threading.Event(), [], tensor_file.write

        def held(*arguments):
            self.waited.append(self.event.wait(20))
            return write(*arguments)

        monkeypatch.setattr(tensor_file, "write", held)

    def on_train_batch_end(self, batch, logs=None):
        if self.first and batch == 1:
            self.event.set()

    def on_epoch_begin(self, epoch, logs=None):
        self.first = epoch == 1


@where_arrays_are_elsewhere
def test_training_changes_nothing_in_a_checkpoint_that_is_being_written(directory, monkeypatch):
    model, expected = make(), make()
    fit(expected)
    hold = Hold(monkeypatch)
    with pytest.raises(Interrupted):
        checkpoint = ShardedCheckpoint(directory)
        fit(model, checkpoint, hold, Interrupt(1, 2), epochs=2)
    checkpoint._store.settle()
    assert hold.waited == [True]
    keras_dist.checkpoints.load(model, directory)
    assert everything_of(model) == everything_of(expected)


def test_a_failed_write_is_named_once_and_training_goes_on(directory, monkeypatch, caplog):
    fit(make(), ShardedCheckpoint(directory))
    left, write, last = [1], os.write, keras_dist.size() - 1

    def write_or_fail(handle, data):
        if threading.current_thread().name == "keras_dist checkpoint" and left:
            left.pop()
            raise OSError(116, "Stale file handle")
        return write(handle, data)

    if keras_dist.rank() == last:
        monkeypatch.setattr(os, "write", write_or_fail)
    caplog.clear()
    model = make()
    assert fit(model, ShardedCheckpoint(directory, restore=False, keep=3), epochs=3) == [0, 1, 2]
    said = [record.getMessage() for record in caplog.records if "keras_dist" in record.name]
    if keras_dist.rank() == 0:
        [text] = [text for text in said if "Stale file handle" in text]
        assert f"rank {last} to write its part" in text and "Training continues" in text
        assert f"{directory}/00000002/" in text
    else:
        assert not said
    keras_dist.barrier()
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    assert sorted(names) == ["00000001", "00000002", "00000003"]  # the number is free again


def test_a_fit_waits_for_the_checkpoint_of_one_that_has_raised(directory, monkeypatch):
    write = os.write

    def write_slowly(handle, data):
        if threading.current_thread().name == "keras_dist checkpoint":
            time.sleep(0.03)
        return write(handle, data)

    if keras_dist.rank() == keras_dist.size() - 1:
        monkeypatch.setattr(os, "write", write_slowly)
    with pytest.raises(Interrupted):
        fit(make(), ShardedCheckpoint(directory), Interrupt(2), epochs=3)
    assert fit(make(), ShardedCheckpoint(directory), epochs=3) == [2]


def test_a_failure_after_the_manifest_loses_nothing(directory, monkeypatch, caplog):
    flush, flushed = os.fsync, []

    def flush_or_fail(handle):
        if threading.current_thread().name == "keras_dist checkpoint":
            flushed.append(handle)
            if len(flushed) == 4:  # part, its directory, manifest, its directory
                raise PermissionError(13, "Permission denied")  # an error that may not pass
        flush(handle)

    if keras_dist.rank() == 0:
        monkeypatch.setattr(os, "fsync", flush_or_fail)
    model = make()
    fit(model, ShardedCheckpoint(directory))
    said = [text for text in caplog.messages if "Permission denied" in text]
    assert len(said) == (keras_dist.rank() == 0)
    assert all("to write the manifest" in t and "is whole and stays" in t for t in said)
    keras_dist.barrier()
    other = make()
    assert keras_dist.checkpoints.load(other, directory) == 1
    assert everything_of(other) == everything_of(model)


def test_arrays_that_one_rank_cannot_read_are_an_error_on_every_rank(directory, monkeypatch):
    fit(make(), ShardedCheckpoint(directory))
    keras_dist.barrier()

    def fail(contents):
        raise OSError(116, "Stale file handle")

    last = keras_dist.size() - 1
    if keras_dist.rank() == last:
        monkeypatch.setattr(Contents, "others", fail)
    with pytest.raises(errors.CheckpointError, match="Stale file handle") as caught:
        fit(make(), ShardedCheckpoint(directory))
    assert agreed(str(caught.value)) and f"[rank {last} of" in str(caught.value)


@pytest.mark.skipif(keras_dist.size() == 1, reason="one rank cannot differ")
def test_replicas_that_differ_are_not_written(directory):
    class Change(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if keras_dist.rank() == 1:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel + 1)

    with pytest.raises(errors.MismatchError, match="kernel"):
        fit(make(shard_state=False), Change(), ShardedCheckpoint(directory))
    keras_dist.barrier()
    assert format.newest_first(directory) == []


def test_local_variables_are_those_of_the_root(directory):
    def local():
        layer = keras.layers.Dense(3)
        model = keras.Sequential([keras.Input((FEATURES,)), layer])
        adam = keras.optimizers.Adam(0.01)
        wrapped = keras_dist.PartialDistributedOptimizer(adam, local_layers=layer)
        return compiled(model, wrapped)

    model = local()
    fit(model, ShardedCheckpoint(directory))
    keras_dist.barrier()
    again = local()
    before = model_state.bytes_of(again.weights[0]).tobytes()
    keras_dist.checkpoints.load(again, directory)
    wanted = model_state.bytes_of(model.weights[0]).tobytes() if keras_dist.rank() == 0 else before
    assert model_state.bytes_of(again.weights[0]).tobytes() == wanted


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_cover_each_element_once(size):
    values = (np.zeros(5, "float32"), np.zeros(0, "float32"), np.zeros((3, 4), "float16"), 0)
    kinds = ("float32", "float32", "float16", "int")
    variables = [
        keras.Variable(value, dtype=kind, trainable=False)
        for value, kind in zip(values, kinds, strict=True)
    ]
    equal = {id(variable) for variable in variables[:2] + variables[3:]}  # one is local
    seen = {index: [] for index in range(len(variables))}
    for rank in range(size):
        for piece in pieces_of_rank(variables, rank, size, equal, rank == 0):
            seen[piece.index] += range(piece.low, piece.high)
    assert [sorted(seen[i]) for i in seen] == [[*range(5)], [], [*range(12)], [0]]
