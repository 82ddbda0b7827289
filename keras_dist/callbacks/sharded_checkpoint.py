"""Checkpoints that every rank writes a part of, during training."""

import logging
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist.callbacks import rank_states
from keras_dist.callbacks.backup import BackupAndRestore, contents
from keras_dist.callbacks.verification import are_replicas, verify_before_writing
from keras_dist.checkpoints.choosing import newest_of_all
from keras_dist.checkpoints.pieces import SEED, Piece, pieces_of_rank, tensors_of, views_of
from keras_dist.checkpoints.reading import Arrays, Contents, restore
from keras_dist.checkpoints.staging import Stage
from keras_dist.checkpoints.writer import SHARED, Writer
from keras_dist.storage import generations
from keras_dist.storage.root_action import on_all
from keras_dist.storage.tensor_file import Tensor
from keras_dist.storage.versioned_backups import number_of
from keras_dist.training import model_arrays
from keras_dist.training.fit_session import FitSession
from keras_dist.training.model_state import (
    bytes_of,
    has_weights,
    random_states,
    shared_state,
    to_numpy,
)
from keras_dist.training.replicas import verify_sums

WHOLE = "The checkpoint is whole and stays, and training continues. Repair the file system."

_log = logging.getLogger("keras_dist")


class ShardedCheckpoint(BackupAndRestore):
    """Checkpoints of training in progress; each rank writes a part while training continues.

    A checkpoint holds what `BackupAndRestore` holds: weights, optimizers, random states, callback
    states, epoch and batch. Between two steps each rank copies its part into memory of its own; a
    thread writes it. The parts are the slices of an optimizer with `shard_state=True`, and equal
    shares of the state that is equal on all ranks, so that the ranks write as much as each other,
    and none holds the whole state. One checkpoint is written at a time: the next one, and the end
    of `fit`, wait for it.

    A generation is a directory of parts, with their SHA-256 in their names, and a manifest, which
    the root writes when all parts are whole and on the disk. Without a manifest a generation does
    not exist, whenever ranks are killed. `keep` generations stay; an older one is removed after a
    newer one is whole.

    At the start of `fit`, all ranks compare digests and restore the newest undamaged generation, if
    there is one; the root names damaged files in a warning. The number of ranks may differ, and so
    may the backend, as described for `BackupAndRestore`. `keras_dist.checkpoints.load` reads a
    checkpoint without `fit`; `keras_dist.checkpoints.export` and the command `keras-dist export`
    make one `.keras` file of it.

    If the disk is full, the server of the files fails, or a rank dies and the others continue, or
    if any write fails after a first successful write, training continues: the root logs a warning,
    which names rank and file of a failed write, and earlier generations stay. The ranks learn of it
    at the next checkpoint or the end of `fit`.

    The replicas are compared before each write, by sums of their bytes. Of variables that are local
    to each rank, only the root's are saved and restored, on the root.

    Collective: every rank must pass the callback to `fit`, with the same arguments, behind
    `BroadcastGlobalVariablesCallback`.

    Args:
        directory: a directory that all ranks share, used by this checkpoint only.
        save_freq: `"epoch"` or a number of batches. Defaults to `"epoch"`.
        keep: number of generations that are kept, at least 1. Defaults to 2.
        restore: whether `fit` begins with the newest generation. Defaults to `True`.
        asynchronous: whether training continues during a write. Otherwise all ranks wait, and no
            copy is made. Defaults to `True`.
        root_rank: rank that writes the manifest. Defaults to 0.

    Raises:
        CheckpointError: the first checkpoint cannot be written, or a checkpoint cannot be read or
            all are damaged; raised on every rank, by `fit`.
        MismatchError: the replicas differ; raised on every rank, by `fit`.
        ArgumentError: `keep` is not a positive integer; `root_rank` is not a rank.

    Example:

    ```python
    checkpoint = keras_dist.callbacks.ShardedCheckpoint("checkpoints", save_freq=1000)
    model.fit(dataset, epochs=10, callbacks=keras_dist.callbacks(checkpoint))
    ```
    """

    def __init__(
        self,
        directory: Any,
        save_freq: str | int = "epoch",
        *,
        keep: int = 2,
        restore: bool = True,
        asynchronous: bool = True,
        root_rank: int = 0,
    ):
        super().__init__(directory, save_freq, delete_checkpoint=False, root_rank=root_rank)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            expected = "keep to be a number of generations"
            text = errors.explain(runtime.where(), expected, repr(keep), "Pass 2.")
            raise errors.ArgumentError(text)
        self.keep, self.restore, self.asynchronous = keep, restore, asynchronous
        self._stage, self._writer = Stage(), Writer(self._directory, keep)
        self._started: tuple[int, int] | None = None  # epoch and step of the last write
        self._size = 0  # number of ranks that wrote it
        self._found: Contents | None = None  # what was restored
        self._previous: int | None = None  # number of the newest generation known undamaged
        self._config: str | None = None

    def enter(self, session: FitSession) -> None:
        """Waits for the write of an earlier `fit` that raised, and looks for a checkpoint."""
        self._settle()
        self._found = None
        super().enter(session)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the newest generation on all ranks, and makes room for copies."""
        super().on_train_begin(logs)
        self._config = _describe(self.model)  # the root may become another rank
        if has_weights(self.model) and self.asynchronous:
            self._stage.reserve(self._pieces(model_arrays.describe(self.model, {})))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the last checkpoint is whole."""
        super().on_train_end(logs)
        self._settle()
        self._stage.release()

    def save_now(self) -> bool:
        """Writes a checkpoint of the current step, unless it exists, and waits for it.

        Collective: every rank; blocks.

        Returns:
            Whether a checkpoint of the current step exists.
        """
        self._settle()
        super().save_now()
        self._settle()
        return self._written == (self._keras_dist_epoch, self._step)

    def _back_up(self) -> None:
        self._settle()
        number = self._on_root(self._begin, "to begin a checkpoint in", SHARED)
        if number is None:
            return  # the root has logged why
        statistics = verify_before_writing(self.model, check=verify_sums)
        self._random_states = self._random.gather(within=self._has_begun)
        self._rank_states = self._fit.gather(self.model, self.session.last_logs, statistics)
        about = self._describe()
        pieces = self._pieces(model_arrays.describe(self.model, about))
        copy = self._stage.copy if self.asynchronous else views_of
        tensors, manifest = tensors_of(pieces, copy(pieces)), None
        if self._is_root():
            tensors += self._arrays_of_root(about)
            manifest = {**about, "model": self._config}
        self._size = runtime.fit_size()
        place = (runtime.fit_rank(), self._size)
        self._writer.start(number, place, tensors, manifest, self._previous)
        self._started = (self._keras_dist_epoch, self._step)
        if not self.asynchronous:
            self._settle()
        # The checkpoint has the averages. Training continues as without it.
        rank_states.assign_statistics(self.model, statistics)

    def _settle(self) -> None:
        """Waits until the last write has ended. Collective: every rank; blocks."""
        started, self._started = self._started, None
        if started is None:
            return
        failures = _engine.collectives.allgather_object(
            runtime.fit_communicator(),
            self._writer.wait_for_part(),
            operation="the parts of a checkpoint",
        )
        is_whole = self._on_root(lambda: self._conclude(failures), "to write", SHARED)
        self._writer.finish(are_whole=True)
        if is_whole:
            self._written, self._previous = started, self._writer.number
            self._retry_policy.succeed()

    def _begin(self) -> int | None:
        """Begins a generation on the root; returns its number, or `None` after a failure."""
        begun: list[int] = []

        def begin() -> bool:
            begun.append(generations.begin(self._directory))
            return False  # nothing is written yet

        self._retry_policy.attempt(begin, f"to begin a checkpoint in {self._directory}")
        return begun[0] if begun else None

    def _conclude(self, failures: Sequence[OSError | None]) -> bool:
        """Waits for the manifest, on the root; returns whether the generation is whole."""
        failed = {rank: each for rank, each in enumerate(failures) if each is not None}
        lost = self._size - runtime.fit_size()
        who = f"rank {min(failed)} to write its part" if failed else "to write the manifest"
        expected = f"{who} of a checkpoint in {self._directory}"
        own = self._writer.finish(are_whole=not failed and not lost)
        failure = next(iter(failed.values()), own)
        if lost and not self._writer.is_whole():
            # The root may be another rank now, whose host may not see a manifest of the dead one
            # yet: the next manifest removes the parts.
            text = f"{lost} of {self._size} ranks have died during the write"
            self._retry_policy.log(errors.CheckpointError(text), expected)
            return False
        if failure is None:
            return True
        if self._writer.is_whole():  # what failed came after the manifest
            self._retry_policy.log(failure, expected, WHOLE)
            return True
        self._writer.discard()
        self._retry_policy.judge(failure, expected)
        return False

    def _pieces(self, variables: Sequence[Any]) -> list[Piece]:
        """Returns the pieces that this rank writes."""
        equal = shared_state(self.model) if are_replicas(self.model) else []
        ids = {id(variable) for variable in equal}
        place = runtime.fit_rank(), runtime.fit_size()
        return pieces_of_rank(variables, *place, lambda v: id(v) in ids, self._is_root())

    def _arrays_of_root(self, about: dict[str, Any]) -> list[Tensor]:
        """Returns random states, and the states of callbacks and ranks; adds them to the JSON."""
        seeds = [to_numpy(state) for state in random_states(self.model)]
        about["seed dtypes"] = [seed.dtype.name for seed in seeds]
        arrays = {f"{SEED}{number}": bytes_of(seed) for number, seed in enumerate(seeds)}
        arrays.update(model_arrays.write_layers(self.model))
        self._add_fit(about, arrays)
        # Callbacks may change their arrays during the write.
        return [Tensor(name, "uint8", array.copy().data) for name, array in arrays.items()]

    def _is_root(self) -> bool:
        return runtime.rank() == self.root_rank

    def _has_backup(self) -> bool:
        return self.restore and bool(generations.newest_first(self._directory))

    def _read_state(self) -> dict[str, Any] | None:
        if self.restore and self._found is None:
            self._found = newest_of_all(self._directory, self.root_rank)
            if self._found is not None:
                self._previous = number_of(self._found.generation.path)
        if (found := self._found) is None:
            return None
        others: dict[str, Any] = {}

        def read() -> None:
            restore(self.model, found, self._is_root())
            others.update(contents(found.generation.about, Arrays(found)))

        on_all(read, "the reading of a checkpoint")
        return others


def _describe(model: keras.Model) -> str | None:
    """Returns the configuration of a model as JSON, if it has one, for `export`."""
    try:
        return model.to_json()
    except Exception as error:  # of a user's class
        _log.debug("keras_dist: model %r has no configuration: %s", model.name, error)
        return None
