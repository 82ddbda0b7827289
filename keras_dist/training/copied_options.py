"""Reduction options in the copies of an optimizer that Keras makes.

Keras copies an optimizer by its configuration (`from_config`, `clone_model`, wrappers of
scikit-learn) or by a saved file (`copy.deepcopy`, `pickle`, `load_model`). The text of
`saved_options` travels with both: with the keys of the configuration, which equal those of plain
Keras, and among the assets of the file. A process without keras_dist ignores it.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import keras

from keras_dist._compat.keras.optimizer_state import trained_by
from keras_dist._compat.keras.optimizers import make_unpickler
from keras_dist.training import saved_options
from keras_dist.training.model_state import keras_variables


class KeepsOptions:
    """Base mixin of optimizers whose copies have the same options; precedes the user's class."""

    _keras_dist: Any  # a `GradientReduction`

    def _keras_dist_text(self) -> str:
        """Returns the text that describes the options."""
        mine = self._keras_dist
        variables = trained_by(self)
        local = keras_variables(variables, mine.registered)
        return saved_options.describe(mine.options, variables, local, mine.local_layers)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the user's class; its copies have the same options."""
        text = self._keras_dist_text()
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {_Key.of(key, text): value for key, value in config.items()}

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates an optimizer of the user's class from a configuration."""
        return base_of(cls).from_config(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickles an optimizer of the user's class, with the options among its assets."""
        arguments = super().__reduce__()[1]
        return make_unpickler(base_of(type(self))), arguments

    def save_assets(self, directory: str) -> None:
        """Writes the options. Keras calls this method when it saves a model."""
        if hasattr(super(), "save_assets"):
            super().save_assets(directory)  # type: ignore[misc]
        pathlib.Path(directory, saved_options.FILE).write_text(self._keras_dist_text())


def base_of(cls: type) -> Any:
    """Returns the user's class of a class made by `derived`."""
    return cls.__bases__[1]


@functools.cache
def derived(base: Any, mixin: Any) -> Any:
    """Returns a subclass of an optimizer's class with the same name and module."""
    made = type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__},
    )
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:
        # Both classes are saved under the registered name, which loads the user's class.
        for registered in (made, base):
            keras.saving.register_keras_serializable(package, name)(registered)
    return made


class _Key(str):
    """A key of the configuration of an optimizer, with the text of its options."""

    text: str

    @staticmethod
    def of(key: str, text: str) -> "_Key":
        made = _Key(key)
        made.text = text
        return made

    def __deepcopy__(self, memo: Any) -> "_Key":
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)  # a pickled configuration loads without keras_dist


def text_in(config: Mapping[str, Any]) -> str | None:
    """Returns the options in the keys of a configuration; `None` if there are none."""
    return next((key.text for key in config if isinstance(key, _Key)), None)


def plain_config(optimizer: Any) -> dict[str, Any]:
    """Returns the configuration of an optimizer without options, which makes a plain one."""
    plain: dict[str, Any] = _without_options(optimizer.get_config())
    return plain


def _without_options(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_options(item) for key, item in value.items()}
    return [_without_options(item) for item in value] if isinstance(value, list) else value
