"""Checkpoints that every rank writes a part of, during training."""

import pathlib
from typing import Any

from keras_dist import errors, runtime
from keras_dist.callbacks.backup import ResumingCallback
from keras_dist.resume.stores import Store


class ShardedCheckpoint(ResumingCallback):
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
        runtime.communicator().index_of_root(root_rank)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            expected = "keep to be a number of generations"
            text = errors.explain(runtime.where(), expected, repr(keep), "Pass 2.")
            raise errors.ArgumentError(text)
        self.keep, self.restore, self.asynchronous = keep, restore, asynchronous
        path = pathlib.Path(str(directory))
        store = Store(
            path,
            root_rank,
            by_all=True,
            keep=keep,
            restores=restore,
            asynchronous=asynchronous,
        )
        super().__init__(
            directory, save_freq, delete_checkpoint=False, store=store, root_rank=root_rank
        )
