"""Callbacks that act on the root only, and its console output."""

import functools
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist.storage.root_action import on_root
from keras_dist.training.session_callback import SessionCallback

HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
# Hooks that every rank calls, rarely enough for a collective.
SYNCHRONIZED = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")

EARLY_STOPPING = keras.callbacks.EarlyStopping
# They make the replica of the root differ from others.
CHANGE_MODEL = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class RootConsoleCallback(SessionCallback):
    """Sets `verbose=0` on all ranks but the root.

    The callback must precede Keras' progress bar, which Keras appends to the list. On ranks other
    than the root Keras' interactive logging is disabled, which also silences other callbacks and
    later calls of `evaluate`.

    Args:
        root_rank: rank that prints. Defaults to 0.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank = root_rank

    def set_params(self, params: dict[str, Any]) -> None:
        """Sets `verbose` to 0 in the parameters, a dict that all callbacks share."""
        super().set_params(params)
        if runtime.rank() != self.root_rank:
            params["verbose"] = 0
            keras.utils.disable_interactive_logging()


class RootOnly(SessionCallback):
    """Calls a callback on the root only, such as `TensorBoard`, `CSVLogger` or a user callback.

    The other ranks have the callback, but do not call it. A failure at the beginning or end of
    training or of an epoch raises on all ranks; a failure in a batch hook ends the job like any
    other exception on a rank.

    If the callback stops training, `AgreeOnStoppingCallback` stops all ranks. The callback must
    not run collectives or change weights, optimizer or learning rate, because the other replicas
    would differ.

    Collective: every rank must pass it to `fit`, with a callback of the same class.

    Args:
        callback: a Keras callback.
        root_rank: rank on which the callback acts. Defaults to 0.

    Raises:
        CallbackError: the callback failed; raised on every rank, by `fit`.
        ArgumentTypeError: `callback` is not a Keras callback.
        ArgumentError: `root_rank` is not a rank, or `callback` is one of Keras that changes the
            model or its learning rate, such as `EarlyStopping(restore_best_weights=True)`.

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
                "a Keras callback",
                f"{callback!r} of type {type(callback).__name__}",
                "Pass an instance, for example RootOnly(keras.callbacks.CSVLogger(path)).",
            )
        restores = isinstance(callback, EARLY_STOPPING) and callback.restore_best_weights
        if restores or isinstance(callback, CHANGE_MODEL):
            raise errors.ArgumentError(
                "a callback that leaves weights, optimizer and learning rate as they are",
                type(callback).__name__ + (" with restore_best_weights" if restores else ""),
                "Pass it to keras_dist.callbacks() itself, without RootOnly: every rank acts "
                "alike, on the metrics of all ranks.",
            )
        runtime.communicator().index_of_root(root_rank)
        self.callback = callback
        self.root_rank = root_rank
        self._has_begun = False  # on this rank
        # Overridden hooks only: on JAX and torch Keras calls batch hooks in a thread pool unless a
        # callback of the list overrides them.
        for hook in HOOKS:
            if overrides(callback, hook):
                setattr(self, hook, functools.partial(self._act, hook))

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if runtime.rank() == self.root_rank:
            self._has_begun = True
            self.callback.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        if runtime.rank() == self.root_rank:
            self.callback.set_params(params)

    def _act(self, hook: str, *args: Any, **kwargs: Any) -> None:
        def act() -> None:
            if not self._has_begun:
                self._take_over(hook)
            getattr(self.callback, hook)(*args, **kwargs)

        if hook in SYNCHRONIZED:
            on_root(
                self.root_rank,
                f"{type(self.callback).__name__}.{hook}",
                act,
                errors.CallbackError,
                f"{type(self.callback).__name__}.{hook} to succeed",
                "Fix the callback, or remove it.",
            )
        elif runtime.rank() == self.root_rank:
            act()

    def _take_over(self, hook: str) -> None:
        """Starts the callback during training if this rank replaces a root that died."""
        self._has_begun = True
        self.callback.set_params(self.planned)
        self.callback.set_model(self.model)
        if isinstance(self.callback, keras.callbacks.CSVLogger):
            self.callback.append = True  # keeps the rows of the previous root
        if hook != "on_train_begin":
            self.callback.on_train_begin()


def unwrapped(callback: keras.callbacks.Callback) -> tuple[keras.callbacks.Callback, bool]:
    """Returns the callback without `RootOnly`, and whether it acts on this rank."""
    if not isinstance(callback, RootOnly):
        return callback, True
    inner, acts = unwrapped(callback.callback)
    return inner, acts and runtime.rank() == callback.root_rank


def overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Returns whether a callback overrides a hook, in its class or on the instance."""
    own = getattr(callback, hook)
    return getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, hook)
