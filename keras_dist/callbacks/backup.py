"""Training that was interrupted goes on, on all ranks, from what the root has written."""

import functools
import itertools
import json
import pathlib
import shutil
import warnings
from typing import Any

import h5py
import keras

from keras_dist import errors, runtime
from keras_dist.callbacks.files import NEEDS_ROOM, write_beside
from keras_dist.callbacks.root import on_root
from keras_dist.data import epochs
from keras_dist.replicas import (
    accumulators,
    broadcast_state,
    optimizers_of,
    random_states,
    separate_seeds,
    state,
    variable_name,
)

__all__ = ["BackupAndRestore"]

# What Keras does not write with weights and optimizer, as attributes of its file.
EPOCH, SEED, DATA = "keras_dist_epoch", "keras_dist_seed", "keras_dist_data"
# The names and shapes of what is in the file. Keras takes from it what its model has, in silence
# where there is more, and only warns where an optimizer's state does not fit.
VARIABLES = "keras_dist_variables"

ANEW = "Remove it to begin anew."


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras' `BackupAndRestore` for many ranks: only the root writes and reads.

    Weights, optimizer state, random states and epoch are in one file, which takes its place in
    one go, so an interruption at any moment leaves a whole backup. All ranks receive the root's
    state and go on with the same epoch, also when only the root sees the directory. From the
    border of an epoch they go on to the same bits as without interruption where the data comes
    in the same order. It does when it is not shuffled, and when `keras_dist.data.shard` shuffles
    arrays, as the epoch that each such data set has come to is kept too; Keras' own shuffling
    and that of a `tf.data.Dataset` begin anew. On torch dropout needs a seed, or else it draws
    from torch's own generator.

    As in Keras, a backup in the midst of an epoch, `save_freq` being a number, resumes at the
    begin of that epoch. Gradients that ranks have gathered and not yet applied are lost: let the
    steps of an epoch be a multiple of `backward_passes_per_step`. Of variables that each rank keeps
    for itself only the root's are kept, and only the root receives them again.

    Collective: every rank must pass it to `fit`, with the same arguments, behind
    `BroadcastGlobalVariablesCallback`.

    Args:
        backup_dir: as in Keras; a local directory.
        *args: as in Keras.
        root_rank: the rank that writes and reads. Defaults to 0.
        **kwargs: as in Keras.

    Raises:
        CheckpointError: the backup could not be written, read or removed; raised on every
            rank, by `fit`.
        ArgumentError: `root_rank` is not a rank.
    """

    def __init__(self, backup_dir: Any, *args: Any, root_rank: int = 0, **kwargs: Any):
        super().__init__(str(backup_dir), *args, **kwargs)
        runtime.communicator().place_of_root(root_rank)
        self.root_rank = root_rank
        directory = pathlib.Path(self.backup_dir)
        self._latest = directory / "latest.weights.h5"
        self._previous = directory / "previous.weights.h5"
        self._data: dict[str, int] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Gives all ranks what the root finds in the directory, if anything."""
        epoch, data = self._on_root(self._restore, "to restore the backup in", ANEW)
        # Of an earlier fit of this model it would count again.
        self.model._initial_epoch = epoch
        if epoch is not None:
            epochs.go_on_with(data)
            # The file holds those of the root, which would count for all ranks.
            for gathered in accumulators(optimizers_of(self.model)):
                gathered.assign(keras.ops.zeros(gathered.shape, gathered.dtype))
            broadcast_state(self.model, self.root_rank)
            separate_seeds(self.model, self.root_rank)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes to which epoch a backup in its midst is to go back."""
        self._current_epoch = epoch  # Keras counts from 0 until the first that it has seen end
        self._data = epochs.numbers()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes, unless it does so at batches; the next epoch is the one to go on with."""
        self._data = epochs.numbers()
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the backup, unless it is to be kept."""
        if self.delete_checkpoint:
            self._on_root(
                functools.partial(shutil.rmtree, self.backup_dir, ignore_errors=True),
                "to remove the backup in",
                "Remove it by hand.",
            )

    def _save_model(self) -> None:
        self._on_root(self._write, "to write a backup into", NEEDS_ROOM)

    def _on_root(self, work: Any, what: str, remedy: str) -> Any:
        expected = f"{what} {self.backup_dir}"
        return on_root(self.root_rank, what, work, errors.CheckpointError, expected, remedy)

    def _write(self) -> None:
        self._latest.parent.mkdir(parents=True, exist_ok=True)
        if self.double_checkpoint and self._latest.exists():
            self._latest.replace(self._previous)

        def save(path: str) -> None:
            self.model.save_weights(path)
            with h5py.File(path, "r+") as file:
                file.attrs[EPOCH] = self._current_epoch
                file[VARIABLES] = json.dumps(_describe(self.model))
                file.attrs[DATA] = json.dumps(self._data)
                for number, variable in enumerate(random_states(self.model)):
                    file.attrs[f"{SEED}_{number}"] = keras.ops.convert_to_numpy(variable)

        write_beside(save, str(self._latest))

    def _restore(self) -> tuple[int | None, dict[str, int]]:
        """Loads the latest backup that can be read; returns the epoch to go on with, the data's."""
        found = [path for path in (self._latest, self._previous) if path.exists()]
        for path in found:
            try:
                return self._load(path)
            except errors.CheckpointError:
                raise
            except Exception as error:  # whatever is wrong with a file, there may be another
                if path == found[-1]:
                    expected = f"to restore the backup {path}"
                    received = f"{type(error).__name__}: {error}"
                    text = errors.explain(runtime.where(), expected, received, ANEW)
                    raise errors.CheckpointError(text) from error
                warnings.warn(f"{path} cannot be read: {error}", RuntimeWarning, stacklevel=2)
        return None, {}

    def _load(self, path: pathlib.Path) -> tuple[int, dict[str, int]]:
        if not self.model.built:
            raise ValueError("the model is not built; build it before fit")
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        with h5py.File(path) as file:
            if VARIABLES in file:
                self._check(json.loads(file[VARIABLES][()]), path)
        with warnings.catch_warnings():
            # Keras only warns that it skips an optimizer or a layer of another shape.
            warnings.simplefilter("error", UserWarning)
            self.model.load_weights(str(path))
        with h5py.File(path) as file:
            for number, variable in enumerate(random_states(self.model)):
                variable.assign(file.attrs[f"{SEED}_{number}"])
            return int(file.attrs[EPOCH]), json.loads(file.attrs.get(DATA, "{}"))

    def _check(self, written: list[tuple[str, list[int]]], path: pathlib.Path) -> None:
        """Checks that a file was written by a model and an optimizer such as these.

        Raises:
            CheckpointError: by others.
        """
        mine = _describe(self.model)
        pairs = itertools.zip_longest(mine, written, fillvalue=("none", None))
        different = next((pair for pair in pairs if pair[0][1] != pair[1][1]), None)
        if different is None:
            return
        (expected, shape), (received, other) = different
        raise errors.CheckpointError(
            errors.explain(
                runtime.where(),
                f"the {len(mine)} variables of this model and its optimizer in the backup {path}, "
                f"with {expected!r} of shape {shape}",
                f"{len(written)} variables, with {received!r} of shape {other} in that place",
                ANEW,
            )
        )


def _describe(model: keras.Model) -> list[tuple[str, list[int]]]:
    """Returns names and shapes of a model's weights and of its optimizer's variables."""
    return [(variable_name(variable), list(variable.shape)) for variable in state(model)]
