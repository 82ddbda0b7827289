"""Loading a checkpoint into a model, on all ranks."""

import os
import pathlib

import keras

from keras_dist import errors, runtime
from keras_dist.checkpoints.choosing import newest_of_all
from keras_dist.checkpoints.reading import restore
from keras_dist.storage.root_action import on_all
from keras_dist.training.model_state import accumulators, optimizers_of


def load(model: keras.Model, directory: str | os.PathLike[str], *, root_rank: int = 0) -> int:
    """Loads the newest whole generation of a sharded checkpoint into a model.

    The ranks may be more or fewer than those that wrote it, and use another backend. Each rank
    reads weights, and of optimizers with `shard_state=True` its slice of the state. The ranks
    compare the digests of all files first; a damaged generation is skipped with a warning of the
    root.

    `keras_dist.callbacks.ShardedCheckpoint` also restores the epoch, random states and callbacks.

    Collective: every rank, in a job; blocks.

    Args:
        model: a built model, compiled with the optimizer that it was trained with.
        directory: the directory of `ShardedCheckpoint`.
        root_rank: rank that chooses the generation. Defaults to 0.

    Returns:
        The number of complete epochs, for `initial_epoch` of `fit`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or of another model.
        ArgumentError: `root_rank` is not a rank.

    Example:

    ```python
    epoch = keras_dist.checkpoints.load(model, "checkpoints")
    model.fit(dataset, epochs=10, initial_epoch=epoch, callbacks=keras_dist.callbacks())
    ```
    """
    comm = runtime.communicator()
    comm.index_of_root(root_rank)
    path = pathlib.Path(directory)
    contents = newest_of_all(path, root_rank)
    if contents is None:
        raise missing(path)
    on_all(
        lambda: restore(model, contents, comm.job.rank == root_rank), "the loading of a checkpoint"
    )
    for accumulator in accumulators(optimizers_of(model)):
        accumulator.assign(keras.ops.zeros(accumulator.shape, accumulator.dtype))
    return int(contents.generation.about["epoch"])


def missing(directory: pathlib.Path) -> errors.CheckpointError:
    """Returns the error about a directory without a whole generation."""
    return errors.CheckpointError(
        runtime.where(),
        f"a whole generation of a sharded checkpoint in {directory}",
        "none",
        "Pass the directory that ShardedCheckpoint writes to.",
    )
