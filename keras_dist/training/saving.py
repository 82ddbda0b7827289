"""`load_model`: loads a Keras model and restores the reduction options of its optimizer."""

import inspect
import os
import pathlib
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import h5py
import keras

from keras_dist import errors
from keras_dist._compat.keras.models import optimizer_of
from keras_dist._compat.keras.optimizer_state import trained_by
from keras_dist._compat.keras.optimizers import innermost_optimizer
from keras_dist.training import saved_options
from keras_dist.training.copies import saved_text, watch_files
from keras_dist.training.model_state import optimizers_inside
from keras_dist.training.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from keras_dist.training.saved_options import plain_config

REMEDY = (
    "Check the path. If the file is damaged, save the model again. Pass the classes of your own "
    "that the model was saved with as custom_optimizers or custom_objects."
)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    compile: bool = True,
    safe_mode: bool = True,
    legacy_opts: bool = False,
    **settings: Any,
) -> keras.Model:
    """Loads a model and makes its optimizer distributed, with the options it was saved with.

    Restores weights, optimizer state and iteration. The optimizer may have been saved plain or
    distributed. A distributed optimizer has the arguments of `DistributedOptimizer` again that it
    was saved with, and the same local variables and layers. A process set is identified by its
    ranks, a compression by its name.

    Not collective: every rank may load the model; or only the root, before the callbacks broadcast
    its state, while other ranks build the same model with the same `DistributedOptimizer`. Errors
    are raised only on ranks that load.

    Args:
        filepath: a `.keras` file, a directory written by Keras, or a legacy `.h5` file, in the
            local file system. A `.h5` file holds no reduction options: the optimizer has those
            of `settings` and the defaults of `DistributedOptimizer`.
        custom_optimizers: optimizer classes that Keras does not know. Defaults to none.
        custom_objects: objects by name, as in Keras. Defaults to none.
        compile: whether to compile the model, as in Keras. A model that is not compiled has no
            optimizer. Defaults to `True`.
        safe_mode: as in Keras. Defaults to `True`.
        legacy_opts: accepted for compatibility with Horovod; has no effect.
        **settings: arguments of `DistributedOptimizer`, which override saved arguments.

    Returns:
        A Keras model.

    Raises:
        CheckpointError: the file does not exist, cannot be read or is damaged; its optimizer state
            does not fit the optimizer; or its options name variables that the model lacks.
        ArgumentError: the process set does not exist, the compression has to be passed, or as for
            `DistributedOptimizer`.
        ArgumentTypeError: `custom_optimizers` holds other objects than optimizer classes, or as
            for `DistributedOptimizer`.

    Example:
    ```python
    model = keras_dist.load_model("model.keras")
    model.fit(dataset, callbacks=keras_dist.callbacks())
    ```
    """
    watch_files()
    inspect.signature(DistributedOptimizer).bind_partial(None, **settings)
    known = _by_name(custom_optimizers) | dict(custom_objects or {})
    _check_archive(pathlib.Path(filepath))
    try:
        model = _load(filepath, known, compile, safe_mode)
        saved = _saved_options(model)
    except Exception as error:  # Keras raises any error of the libraries it uses
        raise _unreadable(filepath, error) from error
    if optimizer_of(model) is not None:
        _distribute(model, saved, settings, filepath)
    return model


def _by_name(optimizers: Any) -> dict[str, type]:
    """Returns optimizer classes by the names under which Keras may have saved them."""
    listed = [optimizers] if isinstance(optimizers, type) else list(optimizers or ())
    for candidate in listed:
        if not (isinstance(candidate, type) and issubclass(candidate, keras.optimizers.Optimizer)):
            raise errors.ArgumentTypeError(
                "custom_optimizers to be a list of classes derived from a Keras optimizer",
                f"{candidate!r} of type {type(candidate).__name__}",
                "Pass for example custom_optimizers=[MyOptimizer].",
            )
    names = [
        (name, candidate)
        for candidate in listed
        for name in (candidate.__name__, keras.saving.get_registered_name(candidate))
    ]
    return dict(names)


def _check_archive(path: pathlib.Path) -> None:
    """Checks the checksums of a `.keras` file; other formats have none."""
    if path.suffix != ".keras" or not path.is_file():
        return
    received = "an incomplete zip archive, or a file of another format"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = archive.testzip()
        if name is None:
            return
        received = f"{name!r} in it does not match its checksum"
    remedy = "The file is damaged: load a copy or an earlier checkpoint."
    expected = f"a complete model file {path}"
    raise errors.CheckpointError(expected, received, remedy)


def _saved_options(model: keras.Model) -> dict[str, Any] | None:
    """Returns the reduction options that a model was saved with, or `None`."""
    optimizer = optimizer_of(model)
    # Those of the inner optimizer, if the reduction was not moved to a loss scale around it.
    every = [] if optimizer is None else [optimizer, *optimizers_inside(optimizer)]
    text = next(filter(None, map(saved_text, every)), None)
    return None if text is None else saved_options.parse(text)


def _load(filepath: Any, known: dict[str, Any], compile: bool, safe_mode: bool) -> keras.Model:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.saving.load_model(filepath, known, compile=compile, safe_mode=safe_mode)
    optimizer = optimizer_of(model)
    for warning in caught:
        # Keras only warns when it skips the state of an optimizer or layer that does not fit.
        if not str(warning.message).startswith("Skipping "):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif not _is_new(str(warning.message), optimizer):
            raise ValueError(str(warning.message).strip())
    if optimizer is not None and str(filepath).endswith((".h5", ".hdf5")):
        _restore_legacy(model, filepath)
    return model


def _is_new(warning: str, optimizer: Any) -> bool:
    """Returns whether the optimizer whose state Keras skips was saved before its first step."""
    number = re.search(r"the saved optimizer has (\d+) variables", warning)
    if optimizer is None or number is None:
        return False
    new = type(optimizer).from_config(plain_config(optimizer))
    return any(
        int(number[1]) == len(candidate.variables) for candidate in (new, innermost_optimizer(new))
    )


def _restore_legacy(model: keras.Model, filepath: Any) -> None:
    """Restores the optimizer of a legacy file, which Keras usually builds for no variables."""
    optimizer = type(model.optimizer).from_config(plain_config(model.optimizer))
    optimizer.build(model.trainable_variables)
    with h5py.File(filepath) as file:
        values = _optimizer_values(file)
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    # An optimizer is saved without state before its first step.
    if len(values) > len(type(optimizer).from_config(plain_config(optimizer)).variables):
        if [value.shape for value in values] != shapes:
            raise ValueError(
                f"{len(values)} saved optimizer variables, or other shapes; the optimizer has "
                f"{len(shapes)}"
            )
        for variable, value in zip(optimizer.variables, values, strict=True):
            variable.assign(value)
    model.optimizer = optimizer


def _optimizer_values(file: h5py.File) -> list[Any]:
    """Returns the optimizer values of a legacy file; long name lists are split over attributes."""
    group = file.get("optimizer_weights")
    lists = [] if group is None else [key for key in group.attrs if key.startswith("weight_names")]
    lists.sort(key=lambda key: (len(key), key))
    return [group[name][()] for key in lists for name in group.attrs[key]]


def _distribute(
    model: keras.Model, saved: dict[str, Any] | None, given: dict[str, Any], filepath: Any
) -> None:
    """Makes a model's optimizer distributed, with given and saved options."""
    optimizer = model.optimizer
    if saved is None:
        DistributedOptimizer(optimizer, **given)
        return
    try:
        found, local, layers = saved_options.read(saved, model, trained_by(optimizer), given)
    except (KeyError, TypeError, AttributeError) as error:  # keras_dist did not write the file
        raise _unreadable(filepath, error) from error
    PartialDistributedOptimizer(optimizer, local_layers=layers, **found, **given)
    for variable in local:
        optimizer.register_local_var(variable)


def _unreadable(filepath: Any, error: Exception) -> errors.CheckpointError:
    expected = f"a model with the state of its optimizer in {filepath}"
    received = f"{type(error).__name__}: {error}"
    return errors.CheckpointError(expected, received, REMEDY)
