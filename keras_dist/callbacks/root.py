"""Callbacks that act on the root alone."""

import functools
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist.storage.root_action import on_root

__all__ = ["RootOnly", "overrides"]

HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
# Rare enough for a meeting, and every rank of a fit comes to them.
MEETINGS = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")


class RootOnly(keras.callbacks.Callback):
    """Lets a callback act on the root alone: TensorBoard, CSVLogger or one of the user's own.

    The other ranks hold the callback as well and never call it. At the begin and end of
    training and of epochs they hear whether it has failed there; a failure at a batch ends
    the job like any other exception of one rank.

    A stop that it decides upon reaches all ranks through `AgreeOnStoppingCallback`. It must
    not call collectives, nor change weights, optimizer or learning rate: the other replicas
    would not follow.

    Collective: every rank must pass it to `fit`, around the same kind of callback.

    Args:
        callback: any Keras callback.
        root_rank: the rank on which it acts. Defaults to 0.

    Raises:
        CallbackError: the callback failed; raised on every rank, by `fit`.
        ArgumentTypeError: `callback` is not a Keras callback.
        ArgumentError: `root_rank` is not a rank.

    Example:
    ```python
    log = keras_dist.callbacks.RootOnly(keras.callbacks.CSVLogger("log.csv"))
    model.fit(dataset, callbacks=keras_dist.callbacks(log))
    ```
    """

    def __init__(self, callback: keras.callbacks.Callback, root_rank: int = 0):
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise errors.ArgumentTypeError(
                errors.explain(
                    runtime.where(),
                    "a Keras callback",
                    f"{callback!r} of type {type(callback).__name__}",
                    "Pass an instance, for example RootOnly(keras.callbacks.CSVLogger(path)).",
                )
            )
        runtime.communicator().index_of_root(root_rank)
        self.callback = callback
        self.root_rank = root_rank
        self._has_begun = False  # on this rank
        # Only those that it has: on JAX and torch Keras calls batch hooks in a pool of threads
        # unless a callback of the list has some.
        for hook in HOOKS:
            if overrides(callback, hook):
                setattr(self, hook, functools.partial(self._act, hook))

    def set_model(self, model: keras.Model) -> None:
        """Hands the model on, on the root."""
        super().set_model(model)
        if runtime.rank() == self.root_rank:
            self._has_begun = True
            self.callback.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Hands the parameters on, on the root."""
        super().set_params(params)
        if runtime.rank() == self.root_rank:
            self.callback.set_params(params)

    def _act(self, hook: str, *args: Any, **kwargs: Any) -> None:
        def act() -> None:
            if not self._has_begun:
                self._take_over(hook)
            getattr(self.callback, hook)(*args, **kwargs)

        if hook in MEETINGS:
            on_root(
                self.root_rank,
                f"{type(self.callback).__name__}.{hook}",
                act,
                errors.CallbackError,
                f"{type(self.callback).__name__}.{hook} to succeed",
                "Mend the callback, or leave it out.",
            )
        elif runtime.rank() == self.root_rank:
            act()

    def _take_over(self, hook: str) -> None:
        """Begins in the midst of training, where the root has died and this rank has its number."""
        self._has_begun = True
        self.callback.set_params(self.params)
        self.callback.set_model(self.model)
        if isinstance(self.callback, keras.callbacks.CSVLogger):
            self.callback.append = True  # what the root before has written stays
        if hook != "on_train_begin":
            self.callback.on_train_begin()


def overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Tells whether a callback has a hook of its own, in its class or set on the instance."""
    own = getattr(callback, hook)
    return getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, hook)
