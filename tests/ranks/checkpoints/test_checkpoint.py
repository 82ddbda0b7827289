"""Checkpoints: written by rank 0, atomically, synchronously or during training."""

import os
import stat
import tempfile
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
from small_training import agreed, distributed, make_data, weights_of

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import BestModelCheckpoint, ModelCheckpoint
from keras_dist.callbacks import checkpoint as checkpoint_module

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")


@pytest.mark.jobs("tensorflow-2", "jax-2")
@pytest.mark.parity("`ModelCheckpoint` writes on the root only")
def test_only_the_root_writes_and_all_leave_together(shared_tmp_path):
    directory = shared_tmp_path / f"seen by rank {keras_dist.rank()}"
    directory.mkdir()
    model = distributed()
    checkpoint = ModelCheckpoint(directory / "deep" / "{epoch}.keras")
    model.fit(*make_data(8), epochs=2, verbose=0, callbacks=keras_dist.callbacks(checkpoint))
    written = sorted(path.name for path in directory.rglob("*.keras"))
    assert written == (["1.keras", "2.keras"] if keras_dist.rank() == 0 else [])
    assert not list(directory.rglob(".*"))
    if keras_dist.rank() == 0:
        loaded = keras.saving.load_model(directory / "deep" / "2.keras")
        for weight, expected in zip(loaded.get_weights(), weights_of(model), strict=True):
            np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_link_stays_and_its_file_is_written(shared_tmp_path, asynchronous):
    link, file = shared_tmp_path / "model.keras", shared_tmp_path / "elsewhere" / "blob"
    if keras_dist.rank() == 0:
        file.parent.mkdir()
        link.symlink_to(file)
    checkpoint = ModelCheckpoint(link, asynchronous=asynchronous)
    x, y = make_data(8, seed=keras_dist.rank())
    distributed().fit(x, y, verbose=0, callbacks=keras_dist.callbacks(checkpoint))
    keras_dist.barrier()
    assert link.is_symlink() and keras_dist.load_model(link)
    assert [path.name for path in file.parent.iterdir()] == ["blob"]


def test_the_best_is_kept_as_in_horovod(shared_tmp_path):
    model = distributed(keras.optimizers.SGD(0.0))
    path = shared_tmp_path / "best.weights.h5"
    checkpoint = BestModelCheckpoint("loss", 0, True)
    checkpoint.filepath = str(path)
    x, y = make_data(8)
    # In the same order, because another order may round to a slightly lower loss.
    model.fit(x, y, shuffle=False, verbose=0, callbacks=keras_dist.callbacks(checkpoint))
    first = path.stat().st_mtime_ns
    keras_dist.barrier()
    model.fit(x, y, shuffle=False, verbose=0, callbacks=keras_dist.callbacks(checkpoint))
    assert path.stat().st_mtime_ns == first
    assert agreed(checkpoint.best)


def test_batches_can_be_counted_and_files_carry_the_users_umask(shared_tmp_path):
    checkpoint = ModelCheckpoint(shared_tmp_path / "{epoch}-{batch}.keras", save_freq=2)
    before = os.umask(0o027)
    try:
        distributed().fit(*make_data(16), batch_size=4, verbose=0, callbacks=[checkpoint])
    finally:
        os.umask(before)
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["1-2.keras", "1-4.keras"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared_tmp_path.iterdir()} == {0o640}


SCORES = [0.5, 0.7, 0.6]


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"mode": "max"}, ["1-0.5", "2-0.7"]),
        ({"mode": "min"}, ["1-0.5"]),
        ({"mode": "max", "initial_value_threshold": 0.55}, ["2-0.7"]),
        ({"mode": "min", "save_freq": 2}, ["1-0.5"]),
        ({"mode": "max", "asynchronous": True}, ["1-0.5", "2-0.7"]),
        ({"mode": "max", "save_best_only": False}, ["1-0.5", "2-0.7", "3-0.6"]),
    ],
)
def test_options_of_keras_mean_what_they_do_there(options, written, shared_tmp_path, capsys):
    model = distributed()
    path = str(shared_tmp_path / "{epoch}-{score:.1f}.keras")
    options = {"save_best_only": True, "verbose": 1} | options
    checkpoint = ModelCheckpoint(path, "score", **options)
    checkpoint.set_model(model)
    capsys.readouterr()
    for epoch, score in enumerate(SCORES):
        checkpoint.on_epoch_begin(epoch)
        for batch in range(2):
            checkpoint.on_train_batch_end(batch, {"score": score})
        checkpoint.on_epoch_end(epoch, {"score": score})
    checkpoint.on_train_end()
    keras_dist.barrier()
    assert sorted(entry.stem for entry in shared_tmp_path.iterdir()) == written
    if options["save_best_only"]:
        assert checkpoint.best == (max if options["mode"] == "max" else min)(SCORES)
    printed = capsys.readouterr().out
    # Later versions of Keras also say that they have finished.
    saved = printed.count("saving model to") - printed.count("finished saving")
    assert saved == (len(written) if keras_dist.rank() == 0 else 0), printed


# --- Checkpoints that are written during training


class Release(keras.callbacks.Callback):
    """Releases a waiting copy when the second epoch starts."""

    def __init__(self):
        super().__init__()
        self.event = threading.Event()

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.event.set()


def fit_behind(checkpoint, *others, epochs=2):
    model = distributed(run_eagerly=True)
    callbacks = keras_dist.callbacks(*others, checkpoint)
    model.fit(*make_data(8), epochs=epochs, verbose=0, callbacks=callbacks)
    return model


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The directory of temporary files of this rank."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_training_goes_on_while_a_checkpoint_is_written(shared_tmp_path, temporary, monkeypatch):
    release, waited = Release(), []

    def slow(*arguments):
        waited.append(release.event.wait(20))
        copy(*arguments)

    copy = checkpoint_module._copy
    monkeypatch.setattr(checkpoint_module, "_copy", slow)
    path = shared_tmp_path / "{epoch}.keras"
    model = fit_behind(ModelCheckpoint(path, asynchronous=True), release)
    keras_dist.barrier()
    # The second epoch started before the first checkpoint existed; both exist now.
    assert waited == ([True, True] if keras_dist.rank() == 0 else [])
    assert sorted(entry.name for entry in shared_tmp_path.iterdir()) == ["1.keras", "2.keras"]
    assert list(temporary.glob("keras_dist*")) == []
    loaded = keras.saving.load_model(shared_tmp_path / "2.keras")
    for weight, expected in zip(loaded.get_weights(), weights_of(model), strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_hdf5_is_written_behind(shared_tmp_path):
    path = shared_tmp_path / "model.weights.h5"
    model, loaded = distributed(), distributed()
    checkpoint = ModelCheckpoint(path, save_weights_only=True, asynchronous=True)
    model.fit(*make_data(8), epochs=2, verbose=0, callbacks=keras_dist.callbacks(checkpoint))
    keras_dist.barrier()
    assert [entry.name for entry in shared_tmp_path.iterdir()] == [path.name]
    loaded.fit(*make_data(8), verbose=0, callbacks=keras_dist.callbacks())  # builds it
    loaded.load_weights(path)
    for weight, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_write_that_fails_behind_is_an_error_on_every_rank(
    epochs, shared_tmp_path, temporary, monkeypatch
):
    def fail(content, beside):
        Path(beside).write_bytes(content.read(100))
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_module, "_copy", fail)
    path = shared_tmp_path / "{epoch}.keras"
    with pytest.raises(errors.CheckpointError, match="Permission denied") as caught:
        fit_behind(ModelCheckpoint(path, asynchronous=True), epochs=epochs)
    assert f"to write the checkpoint {shared_tmp_path / '1.keras'}" in str(caught.value)
    assert agreed(str(caught.value))
    keras_dist.barrier()
    assert [*shared_tmp_path.iterdir(), *temporary.glob("keras_dist*")] == []
