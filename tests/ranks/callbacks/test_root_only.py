"""`RootOnly`: a callback that acts on rank 0 only, and its effects on the other ranks."""

import inspect
import unittest.mock
from pathlib import Path

import keras
import pytest
from small_training import agreed, make_data, make_model

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import RootOnly
from keras_dist.training.agreement import PATHS

pytestmark = pytest.mark.jobs("torch-2")


class Recorder(keras.callbacks.Callback):
    """Records every hook call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def set_model(self, model):
        super().set_model(model)
        self.calls.append("set_model")

    def set_params(self, params):
        super().set_params(params)
        self.calls.append("set_params")

    def on_train_begin(self, logs=None):
        self.calls.append("on_train_begin")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"on_epoch_end {epoch} {sorted(logs)}")

    def on_batch_end(self, batch, logs=None):
        self.calls.append(f"on_batch_end {batch} {self.model.name}")

    def on_test_end(self, logs=None):
        self.calls.append("on_test_end")


def fit(*callbacks, **options):
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = make_model(optimizer, run_eagerly=True)
    options = {"batch_size": 4, "verbose": 0, **options}
    model.fit(*make_data(8), callbacks=keras_dist.callbacks(*callbacks), **options)
    return model


@pytest.mark.jobs("tensorflow-2", "jax-2")
@pytest.mark.parity("`RootOnly`")
def test_every_hook_is_called_on_the_root_and_on_no_other_rank():
    root = keras_dist.size() - 1
    recorder = Recorder()
    model = fit(RootOnly(recorder, root), validation_data=make_data(4))
    expected = [
        "set_model",
        "set_params",
        "on_train_begin",
        f"on_batch_end 0 {model.name}",
        f"on_batch_end 1 {model.name}",
        "on_test_end",
        "on_epoch_end 0 ['loss', 'val_loss']",
    ]
    assert recorder.calls == (expected if keras_dist.rank() == root else [])


@pytest.mark.parametrize("place", ["on all ranks", "on the root", "with the rank"])
def test_the_root_names_files_that_several_ranks_write(shared_tmp_path, caplog, place):
    path = shared_tmp_path / (str(keras_dist.rank()) if place == "with the rank" else "log")
    writers = [
        keras.callbacks.CSVLogger(f"{path}.csv"),
        keras_dist.callbacks.ModelCheckpoint(f"{shared_tmp_path}/model.keras"),
        RootOnly(keras.callbacks.CSVLogger(f"{shared_tmp_path}/root.csv")),
    ]
    for _ in range(2):  # as a script does that calls `fit` for each epoch
        fit(*writers[place == "on the root" and keras_dist.rank() > 0 :])
    warns = place == "on all ranks" and keras_dist.size() > 1 and keras_dist.rank() == 0
    assert caplog.text.count(f"CSVLogger of {path}.csv, on several ranks") == warns
    assert "model.keras" not in caplog.text and "root.csv" not in caplog.text


def test_the_paths_of_all_callbacks_of_keras_that_write_are_known():
    found = []
    for name, kind in vars(keras.callbacks).items():
        if inspect.isclass(kind):
            arguments = inspect.signature(kind).parameters
            words = ("dir", "directory", "filename", "filepath")
            found += [(name, each) for each in arguments if each.endswith(words)]
    assert set(found) == {each for each in PATHS.items() if hasattr(keras.callbacks, each[0])}


@pytest.mark.skipif(not hasattr(keras.callbacks, "OrbaxCheckpoint"), reason="an older Keras")
def test_the_root_names_the_directory_of_orbax(shared_tmp_path, caplog, monkeypatch):
    class Orbax(keras.callbacks.OrbaxCheckpoint):
        """Does not write."""

        on_train_batch_end = on_epoch_end = on_train_end = keras.callbacks.Callback.on_epoch_begin

    kind = keras.callbacks.OrbaxCheckpoint
    monkeypatch.setattr(inspect.getmodule(kind), "ocp", unittest.mock.MagicMock())
    fit(Orbax(str(shared_tmp_path)))
    warns = keras_dist.size() > 1 and keras_dist.rank() == 0
    assert (f"OrbaxCheckpoint of {shared_tmp_path}, on several" in caplog.text) == warns


def test_tensorboard_is_written_once(shared_tmp_path, caplog):
    board = keras.callbacks.TensorBoard(str(shared_tmp_path))
    fit(RootOnly(board), epochs=3, validation_data=make_data(4))
    keras_dist.barrier()
    paths = sorted(shared_tmp_path.rglob("events.out.tfevents.*"))
    assert [path.parent.name for path in paths] == ["train", "validation"]
    assert not caplog.text
    path = shared_tmp_path / "of all"
    fit(keras.callbacks.TensorBoard(str(path)))
    warns = keras_dist.size() > 1 and keras_dist.rank() == 0
    assert (f"TensorBoard of {path}, on several ranks" in caplog.text) == warns
    files = {path.parent.name: path for path in paths}
    assert steps_of("epoch_loss", files["train"]) == [0, 1, 2]
    assert steps_of("evaluation_loss_vs_iterations", files["validation"]) != []


def steps_of(tag, path):
    """Returns the steps of a value in a TensorBoard file."""
    import tensorflow as tf

    events = tf.compat.v1.train.summary_iterator(str(path))
    return [event.step for event in events for value in event.summary.value if value.tag == tag]


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin", "on_epoch_end"])
def test_a_failure_is_raised_on_every_rank(hook):
    class Failing(keras.callbacks.Callback):
        """Raises in one hook."""

    def fail(self, *args):
        raise OSError(28, "No space left", Path("log"))

    setattr(Failing, hook, fail)
    with pytest.raises(errors.CallbackError) as caught:
        fit(RootOnly(Failing()))
    assert f"[rank 0 of {keras_dist.size()}] Expected Failing.{hook}" in str(caught.value)
    assert "No space left" in str(caught.value)
    assert agreed(str(caught.value))


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.SwapEMAWeights(),
    ],
)
def test_a_callback_that_changes_the_model_is_refused_when_it_is_wrapped(callback):
    with pytest.raises(errors.ArgumentError, match=rf"Received: {type(callback).__name__}"):
        RootOnly(callback)
    RootOnly(keras.callbacks.EarlyStopping("loss"))
