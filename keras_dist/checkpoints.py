"""Saved training that any number of ranks reads, also a process without MPI.

`keras_dist.callbacks.BackupAndRestore` and `keras_dist.callbacks.ShardedCheckpoint` write it during
`fit`, in generations. The functions of this module read them: `load` into a model, and `export` as
one file of Keras, in one process. The command `keras-dist checkpoint` lists them.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist.resume import variables
from keras_dist.resume.read import Contents, newest, newest_of_all
from keras_dist.storage.atomic_write import beside, move
from keras_dist.storage.root_action import on_all
from keras_dist.training.replicas import restore_accumulated

__all__ = ["export", "load"]

KERAS, WEIGHTS = ".keras", ".weights.h5"


def load(
    model: keras.Model,
    directory: str | os.PathLike[str],
    *,
    root_rank: int = 0,
    generation: int | None = None,
) -> int:
    """Loads the newest undamaged generation of a directory into a model.

    The ranks may be more or fewer than those that wrote it, and use another backend. Each rank
    reads weights, and of optimizers with `shard_state=True` its slice of the state. The ranks
    compare the digests of all files first; a damaged generation is skipped with a warning of the
    root.

    The callbacks that write generations also restore the epoch, random states and callbacks.

    Collective: every rank, in a job; blocks. In a process in which mpi4py is not installed, the
    process alone.

    Args:
        model: a built model, compiled with the optimizer that it was trained with.
        directory: the directory of `BackupAndRestore` or `ShardedCheckpoint`, which all ranks
            share.
        root_rank: rank that chooses the generation. Defaults to 0.
        generation: number of the generation. Defaults to `None`: the newest.

    Returns:
        The number of complete epochs, for `initial_epoch` of `fit`.

    Raises:
        CheckpointError: there is no generation, it is damaged, or of another model.
        ArgumentError: `root_rank` is not a rank.

    Example:

    ```python
    epoch = keras_dist.checkpoints.load(model, "checkpoints")
    model.fit(dataset, epochs=10, initial_epoch=epoch, callbacks=keras_dist.callbacks())
    ```
    """
    path = pathlib.Path(directory)
    if not runtime.has_mpi():
        contents = _found(path, newest(path, number=generation))
        variables.restore(model, contents, is_root=True, alone=True)
    else:
        comm = runtime.communicator()
        comm.index_of_root(root_rank)
        contents = _found(path, newest_of_all(path, root_rank, generation))
        is_root = comm.job.rank == root_rank
        on_all(lambda: variables.restore(model, contents, is_root), "the loading of a checkpoint")
    restore_accumulated(model, root_rank, bool(contents.about.get("accumulated")))
    return int(contents.about["epoch"])


def export(
    directory: str | os.PathLike[str],
    filepath: str | os.PathLike[str],
    *,
    model: keras.Model | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    generation: int | None = None,
) -> None:
    """Writes the newest undamaged generation of a directory as one file of Keras.

    A `.keras` file holds the model with weights and whole optimizer state, a `.weights.h5` file the
    weights. Both load without keras_dist. The file is written atomically. The command
    `keras-dist export` does the same.

    Not collective: one process calls it, which holds the whole state in memory. It needs no MPI.

    Args:
        directory: the directory of `BackupAndRestore` or `ShardedCheckpoint`.
        filepath: path of the new file, which ends in `.keras` or `.weights.h5`.
        model: a built and compiled model of the same architecture; it gets the state. Defaults to
            `None`: the model that the generation describes.
        custom_objects: objects by name, as in Keras. Defaults to none.
        generation: number of the generation. Defaults to `None`: the newest.

    Raises:
        CheckpointError: there is no generation, it is damaged or of another model; or it describes
            no model that Keras can make, so that `model` must be passed.
        ArgumentError: `filepath` has another ending.

    Example:

    ```python
    keras_dist.checkpoints.export("checkpoints", "model.keras")
    ```
    """
    target, source = pathlib.Path(filepath), pathlib.Path(directory)
    if not target.name.endswith((KERAS, WEIGHTS)):
        expected = "the path of a .keras or .weights.h5 file"
        raise errors.ArgumentError(
            runtime.where(), expected, repr(str(target)), "Pass model.keras."
        )
    contents = _found(source, newest(source, number=generation))
    if model is None:
        model = _described_model(contents, dict(custom_objects or {}))
    variables.restore(model, contents, is_root=True, alone=True)
    save: Callable[[Any], None] = model.save if target.suffix == KERAS else model.save_weights
    place = target.resolve()  # the file that a link names
    with beside(place.with_name(target.name)) as path:
        save(path)
        move(path, place)


def _described_model(contents: Contents, custom_objects: dict[str, Any]) -> keras.Model:
    described = contents.about.get("model")
    try:
        if described is None:
            raise TypeError("the model has no configuration")
        return keras.models.model_from_json(described, custom_objects)
    except Exception as error:  # Keras raises any error of a user's class
        raise errors.CheckpointError(
            runtime.where(),
            f"the description of a model that Keras can make in {contents.generation.path}",
            f"{type(error).__name__}: {error}",
            "Pass a model of the same architecture as model=, or classes as custom_objects=.",
        ) from error


def _found(directory: pathlib.Path, contents: Contents | None) -> Contents:
    if contents is not None:
        return contents
    raise errors.CheckpointError(
        runtime.where(),
        f"a whole generation of saved training in {directory}",
        "none",
        "Pass the directory of BackupAndRestore or ShardedCheckpoint, and a number that it has.",
    )
