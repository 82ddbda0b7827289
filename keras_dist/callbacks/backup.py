"""Callbacks that save training in progress, from which an interrupted job resumes on all ranks."""

from typing import Any

from keras_dist import errors
from keras_dist.callbacks.resuming import ResumingCallback


class BackupAndRestore(ResumingCallback):
    """Keras' `BackupAndRestore` for distributed training: only the root writes and reads.

    A backup holds weights, optimizer state, random states, callback states, epoch and batch: a file
    of safetensors and a manifest, both with digests of their bytes. Writes are atomic, and the
    previous backup is kept, so an intact backup exists whenever the writer is killed. If the newest
    backup is damaged, the root logs a warning and reads the previous one. All ranks receive the
    root's state and resume at the same step, also on another backend; only the root needs access
    to the directory. `keras_dist.checkpoints` reads a backup without `fit`.

    Resumed training is bitwise equal to uninterrupted training if the order of the data is the
    same: data that is not shuffled, or that `keras_dist.data` shuffles, because a backup includes
    the epoch of these datasets. A backup includes the random states of Python, NumPy, torch and
    Keras of each rank; with the same number of ranks, Keras' shuffling and `Dropout` without a seed
    resume as well. At the start of `fit` the root names data that cannot resume, such as a
    `tf.data.Dataset` that shuffles before it is sharded. With `shuffle="global"` a different number
    of ranks may resume, within an epoch at the next unseen sample.

    All optimizers of the model are saved: that of `compile` and optimizers among the attributes of
    a model with a custom `train_step`, including optimizers that are built in the first step.

    Keras' callbacks resume, `EarlyStopping` with its best weights; rows that `CSVLogger` wrote of
    repeated epochs are removed. A user callback resumes if it has the methods `state_dict()` and
    `load_state_dict(state)`. A state consists of JSON values, NumPy arrays and tensors in dicts,
    lists and tuples. `load_state_dict` may be called twice and must replace the state. One warning
    of the root names the user callbacks without these methods. Callbacks are matched by class and
    by position among the callbacks of that class. If a callback stopped training, it stays stopped.

    A backup within an epoch (`save_freq` is a number, or the job received a signal) resumes within
    the epoch. Batches that were trained on are read and skipped: no hooks are called for them, and
    changes of `on_epoch_begin` to the model and its learning rate are undone. Metrics, moving
    statistics and random generators of each rank resume. With a different number of ranks, rank 0
    has the totals of the metrics, moving statistics are their averages over the ranks, random
    generators of the model are derived from the root's, and other generators restart. Gradients
    that wait for the next update are replaced by their averages over the ranks as they are saved,
    which changes the update by rounding only; those for `Adasum` and of local variables are lost.
    Of variables that are local to each rank, only the root's are saved and restored, on the root.

    The replicas are verified before each write, see `VerifyReplicas`. If the disk is full, or any
    write fails after a first successful write, training continues, the root logs a warning and
    existing backups stay. A backup contains arrays and JSON only, no executable code.

    With `memory=True` the two newest backups also lie in the memory of the root's node and of the
    next node. A job that `keras-dist run` restarts reads the newest intact one on any node, the
    file on disk only if that is newer: when the root's node is lost, no disk is needed. If the
    memory is full, the root logs a warning, and the backup on disk remains. `fit` removes them at
    its end.

    Collective: every rank must pass the callback to `fit`, with the same arguments, behind
    `BroadcastGlobalVariablesCallback`.

    Args:
        backup_dir: local directory, used by this backup only.
        *args: see `keras.callbacks.BackupAndRestore`. Two backups are kept regardless of
            `double_checkpoint`.
        root_rank: rank that writes and reads. Defaults to 0.
        memory: whether backups also lie in memory. Defaults to `False`.
        **kwargs: see `keras.callbacks.BackupAndRestore`.

    Raises:
        CheckpointError: the first backup cannot be written, a backup cannot be read or removed, no
            existing backup is intact, or the only one is in the memory of another node and cannot
            be fetched; raised on every rank, by `fit`.
        MismatchError: the replicas differ; raised on every rank, by `fit`.
        ArgumentError: `root_rank` is not a rank.

    Example:

    ```python
    backup = keras_dist.callbacks.BackupAndRestore("backups", save_freq=1000)
    model.fit(dataset, epochs=10, callbacks=keras_dist.callbacks(backup))
    ```
    """

    def __init__(
        self, backup_dir: Any, *args: Any, root_rank: int = 0, memory: bool = False, **kwargs: Any
    ):
        stored = {"by_all": False, "memory": memory}
        super().__init__(backup_dir, *args, stored=stored, root_rank=root_rank, **kwargs)
        self.acts_on_job = "keeps copies of the job in memory" if memory else ""


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
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            expected = "keep to be a number of generations"
            raise errors.ArgumentError(expected, repr(keep), "Pass 2.")
        self.keep, self.restore, self.asynchronous = keep, restore, asynchronous
        stored = {"keep": keep, "restores": restore, "asynchronous": asynchronous, "by_all": True}
        super().__init__(
            directory, save_freq, delete_checkpoint=False, stored=stored, root_rank=root_rank
        )
