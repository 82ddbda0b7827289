"""Checkpoints: the root writes, in one go or not at all, and all ranks go on together."""

import functools
import os
import pathlib
import secrets
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist.callbacks.root import on_root

__all__ = ["ModelCheckpoint", "write_beside"]

SUFFIXES = (".weights.h5", ".keras", ".h5")


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' `ModelCheckpoint` for many ranks: only the root writes.

    The file is written beside its place under another name and then moved there, so a
    reader never meets half a file and a crash leaves the previous checkpoint whole. All
    ranks wait until it is written; when it cannot be, all of them raise the same error.

    Collective: every rank must pass it to `fit`, with the same arguments.

    Args:
        filepath: as in Keras; a local path that ends in `.keras`, `.h5` or `.weights.h5`.
        *args: as in Keras.
        root_rank: the rank that writes. Defaults to 0.
        **kwargs: as in Keras.

    Raises:
        CheckpointError: the file could not be written; raised on every rank, by `fit`.
        ArgumentError: `root_rank` is not a rank.
    """

    best: float | None

    def __init__(self, filepath: str, *args: Any, root_rank: int = 0, **kwargs: Any):
        super().__init__(filepath, *args, **kwargs)
        runtime.communicator().place_of_root(root_rank)
        self.root_rank = root_rank
        if runtime.rank() != root_rank:
            self.verbose = 0

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        path = self._get_file_path(epoch, batch, logs or {})
        self.best = on_root(
            self.root_rank,
            "a checkpoint",
            functools.partial(self._save_atomically, epoch, batch, logs or {}),
            errors.CheckpointError,
            f"to write the checkpoint {path}",
            "Choose a place that the root can write to and that has room.",
        )

    def _save_atomically(self, epoch: int, batch: int | None, logs: dict[str, Any]) -> float | None:
        """Lets Keras decide and write; returns the best value so far."""
        model = self.model
        self.set_model(_AtomicSaver(model))
        try:
            super()._save_model(epoch, batch, logs)
        finally:
            self.set_model(model)
        return self.best


class _AtomicSaver:
    """Stands in for a model while Keras saves it, and saves in one go or not at all."""

    def __init__(self, model: keras.Model):
        self._model = model

    def save(self, filepath: str, overwrite: bool = True) -> None:
        write_beside(self._model.save, filepath)

    def save_weights(self, filepath: str, overwrite: bool = True) -> None:
        write_beside(self._model.save_weights, filepath)


def write_beside(save: Callable[[str], None], filepath: str) -> None:
    """Saves to an unguessable name in the same directory, then moves the file to its place."""
    target = pathlib.Path(filepath)
    suffix = next(suffix for suffix in SUFFIXES if filepath.endswith(suffix))
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}{suffix}")
    try:
        save(str(beside))
        _flush(beside)
        os.replace(beside, target)
        _flush(target.parent)
    finally:
        beside.unlink(missing_ok=True)


def _flush(path: pathlib.Path) -> None:
    """Makes the system put a file, or the entries of a directory, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
