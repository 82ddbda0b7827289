"""Checkpoints: the root writes, in one go or not at all, and all ranks go on together."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_dist import errors, runtime
from keras_dist._compat.keras.callbacks import ModelCheckpoint as KerasCheckpoint
from keras_dist.callbacks.background_writer import NEEDS_ROOM, BackgroundWriter, write_beside
from keras_dist.callbacks.verification import verify_before_writing
from keras_dist.storage.retry_policy import RetryPolicy
from keras_dist.storage.root_action import on_root
from keras_dist.training.model_state import state

__all__ = ["BestModelCheckpoint", "ModelCheckpoint"]

# What HDF5 takes for a variable besides its values, and for itself: an upper bound.
HDF5_NBYTES = 8192


class ModelCheckpoint(KerasCheckpoint):
    """Keras' `ModelCheckpoint` for many ranks: only the root writes.

    The file is written beside its place under another name and then moved there, so a
    reader never meets half a file and a crash leaves the previous checkpoint whole. All
    ranks wait until it is written. A disk that is full does not end the training: the root says
    so, and the checkpoint that is there stays. Nor does any failure after a first write that
    succeeded; one before it is an error on all ranks. Before each write the replicas are verified,
    see `VerifyReplicas`, moving statistics having been averaged. A `.keras` file is a zip archive
    with checksums: `keras_dist.load_model` finds out when it is damaged. Other files have none.

    Where that place is slow, `asynchronous=True` lets training go on meanwhile: the root writes
    to the directory of temporary files, see `TMPDIR`, and a thread moves the file from there. One
    file is on its way at a time: the next checkpoint waits for it, and so does the end of `fit`.

    Collective: every rank must pass it to `fit`, with the same arguments.

    Args:
        filepath: as in Keras; a local path that ends in `.keras`, `.h5` or `.weights.h5`.
        *args: as in Keras.
        root_rank: the rank that writes. Defaults to 0.
        asynchronous: whether training goes on while a file is brought to its place; the words of
            `verbose=1` that saving is finished then come before it is there. Defaults to `False`.
        **kwargs: as in Keras.

    Raises:
        CheckpointError: the first file could not be written; raised on every rank, by `fit`: at
            once, or when `asynchronous` at the next checkpoint or the end of training.
        MismatchError: the replicas differ; raised on every rank, by `fit`.
        ArgumentError: `root_rank` is not a rank.
    """

    best: float | None

    def __init__(
        self,
        filepath: str,
        *args: Any,
        root_rank: int = 0,
        asynchronous: bool = False,
        **kwargs: Any,
    ):
        super().__init__(filepath, *args, **kwargs)
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank
        self._behind = BackgroundWriter() if asynchronous else None
        self._retry_policy = RetryPolicy()
        if runtime.rank() != root_rank:
            self.verbose = 0

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the last checkpoint is at its place."""
        if self._behind is not None:
            self._on_root("the last checkpoint", self._wait, self.filepath)

    def _keras_dist_save(self, path: str, save: Callable[[], None]) -> None:
        verify_before_writing(self.model)
        work = functools.partial(self._save_atomically, path, save)
        self.best = self._on_root("a checkpoint", work, path)

    def _on_root(self, what: str, work: Callable[[], Any], path: str) -> Any:
        expected = f"to write the checkpoint {path}"
        return on_root(self.root_rank, what, work, errors.CheckpointError, expected, NEEDS_ROOM)

    def _wait(self) -> None:
        if self._behind is not None:
            self._retry_policy.attempt(self._behind.wait, "to write the checkpoint before")

    def _save_atomically(self, path: str, save: Callable[[], None]) -> float | None:
        """Lets Keras decide and write; returns the best value so far."""
        self._wait()
        best = self.best
        work = functools.partial(self._save, save)
        # Keras notes the best before it writes.
        return (
            self.best
            if self._retry_policy.attempt(work, f"to write the checkpoint {path}")
            else best
        )

    def _save(self, save: Callable[[], None]) -> bool:
        """Returns whether a file has come to its place."""
        model = self.model
        write = write_beside if self._behind is None else self._behind.write
        saver = _Saver(model, write)
        self.set_model(saver)
        try:
            save()
        finally:
            self.set_model(model)
        return saver.has_saved and self._behind is None


class BestModelCheckpoint(ModelCheckpoint):
    """The `ModelCheckpoint` that keeps the best model alone, with Horovod's arguments.

    Args:
        monitor: as in Keras, like those that follow. Defaults to `"val_loss"`.
        verbose: as in Keras. Defaults to 0.
        save_weights_only: as in Keras. Defaults to `False`.
        mode: as in Keras. Defaults to `"auto"`.
        save_freq: as in Keras. Defaults to `"epoch"`.
        filepath: where to write; the attribute may be set later, too. Defaults to `None`:
            `best.keras`, or `best.weights.h5` for weights alone.
        **kwargs: as for `ModelCheckpoint`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
        **kwargs: Any,
    ):
        path = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(path, monitor, verbose, True, save_weights_only, mode, save_freq, **kwargs)


class _Saver:
    """Stands in for a model while Keras saves it, and hands over how and where to."""

    def __init__(self, model: keras.Model, write: Callable[..., None]):
        self._model, self._write_file = model, write
        self.has_saved = False

    def save(self, filepath: str, overwrite: bool = True) -> None:
        self._write(self._model.save, filepath)

    def save_weights(self, filepath: str, overwrite: bool = True) -> None:
        self._write(self._model.save_weights, filepath)

    def _write(self, save: Callable[[str], None], filepath: str) -> None:
        variables = state(self._model)
        nbytes = sum(np.asarray(keras.ops.convert_to_numpy(one)).nbytes for one in variables)
        self._write_file(save, filepath, nbytes + HDF5_NBYTES * (1 + len(variables)))
        self.has_saved = True
