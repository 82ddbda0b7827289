"""Export of a sharded checkpoint as one file of Keras, in one process."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist.checkpoints.choosing import newest
from keras_dist.checkpoints.loading import missing
from keras_dist.checkpoints.reading import Contents, restore
from keras_dist.storage.atomic_write import beside, move


def export(
    directory: str | os.PathLike[str],
    filepath: str | os.PathLike[str],
    *,
    model: keras.Model | None = None,
    custom_objects: Mapping[str, Any] | None = None,
) -> None:
    """Writes the newest whole generation of a sharded checkpoint as one `.keras` file.

    The file holds the model with weights and whole optimizer state, and loads without keras_dist.
    It is written atomically. The command `keras-dist export` does the same.

    Not collective: one process calls it, which holds the whole state in memory.

    Args:
        directory: the directory of `ShardedCheckpoint`.
        filepath: path of the new file, which ends in `.keras`.
        model: a built and compiled model of the same architecture; it gets the state. Defaults to
            `None`: the model that the checkpoint describes.
        custom_objects: objects by name, as in Keras. Defaults to none.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged or of another model; or it describes
            no model that Keras can make, so that `model` must be passed.
        ArgumentError: `filepath` does not end in `.keras`.

    Example:

    ```python
    keras_dist.checkpoints.export("checkpoints", "model.keras")
    ```
    """
    target = pathlib.Path(filepath)
    if target.suffix != ".keras":
        expected = "the path of a .keras file"
        text = errors.explain(runtime.where(), expected, repr(str(target)), "Pass model.keras.")
        raise errors.ArgumentError(text)
    contents = newest(pathlib.Path(directory))
    if contents is None:
        raise missing(pathlib.Path(directory))
    if model is None:
        model = _described_model(contents, dict(custom_objects or {}))
    restore(model, contents, is_root=True)
    with beside(target) as path:
        model.save(path)
        move(path, target)


def _described_model(contents: Contents, custom_objects: dict[str, Any]) -> keras.Model:
    described = contents.generation.about.get("model")
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
