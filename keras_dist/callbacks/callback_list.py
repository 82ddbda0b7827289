"""The list of the callbacks of a fit, and the end of each of its hooks.

Keras passes the model and the parameters of a fit to callbacks. A `ListMember` also receives the
list, before `on_train_begin` of any callback.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end")


class SharedCallbackList:
    """The callbacks of one fit."""

    def __init__(self, callbacks: keras.callbacks.CallbackList):
        self._list = callbacks
        self._waiting: list[Callable[[], None]] = []
        self._skipped = 0
        #: result of the last train function of this epoch, without additions of callbacks
        self.logs: dict[str, Any] = {}
        # Set on the instance, from the class: a list may be used for a second fit.
        vars(callbacks).update(
            on_epoch_begin=self._followed("on_epoch_begin"),
            on_epoch_end=self._followed("on_epoch_end"),
            **{hook: self._unless_skipped(hook) for hook in BATCH_HOOKS},
        )

    @property
    def callbacks(self) -> Sequence[keras.callbacks.Callback]:
        """All callbacks, including those that Keras adds."""
        return self._list.callbacks

    def when_all_have_been_called(self, work: Callable[[], None]) -> None:
        """Runs a function after the current hook of all callbacks of the list."""
        self._waiting.append(work)

    def skip(self, batches: int, logs: dict[str, Any]) -> None:
        """Skips the hooks of the first batches of this epoch."""
        self._skipped, self.logs = batches, logs

    def follow(self) -> None:
        """Runs the functions that wait for the end of the current hook."""
        while self._waiting:
            self._waiting.pop(0)()

    def _followed(self, name: str) -> Callable[..., None]:
        hook = getattr(type(self._list), name)

        def followed(*args: Any, **kwargs: Any) -> None:
            hook(self._list, *args, **kwargs)
            self.follow()
            if name == "on_epoch_end":
                self._skipped, self.logs = 0, {}

        return followed

    def _unless_skipped(self, name: str) -> Callable[..., None]:
        followed = self._followed(name)

        def unless_skipped(batch: int, logs: Any = None) -> None:
            if batch < self._skipped:
                return
            if isinstance(logs, dict):
                self.logs = logs
            followed(batch, logs)

        return unless_skipped


class ListMember:
    """Base class of callbacks that act after all callbacks of their list."""

    whole_list: SharedCallbackList | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Patches the lists of Keras, once."""
        _watch_lists()
        return super().__new__(cls)

    def before_training(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Receives all callbacks of the list, before `on_train_begin` of any of them."""

    def last_logs(self) -> dict[str, Any]:
        """Returns the logs of the last batch of this epoch, without additions of callbacks."""
        return {} if self.whole_list is None else self.whole_list.logs

    def when_all_have_been_called(self, work: Callable[[], None]) -> None:
        """Runs a function after the current hook of all callbacks; at once outside of a list."""
        if self.whole_list is None:
            work()
        else:
            self.whole_list.when_all_have_been_called(work)


@functools.cache
def _watch_lists() -> None:
    """Patches `keras.callbacks.CallbackList` to pass itself to its members."""
    begin, end = (
        keras.callbacks.CallbackList.on_train_begin,
        keras.callbacks.CallbackList.on_train_end,
    )

    @functools.wraps(begin)
    def on_train_begin(self: keras.callbacks.CallbackList, *args: Any, **kwargs: Any) -> None:
        members = _members(self)
        if not members:
            return begin(self, *args, **kwargs)
        whole = SharedCallbackList(self)
        for member in members:
            member.whole_list = whole
        for member in members:
            member.before_training(whole.callbacks)
        begin(self, *args, **kwargs)
        return whole.follow()

    @functools.wraps(end)
    def on_train_end(self: keras.callbacks.CallbackList, *args: Any, **kwargs: Any) -> None:
        end(self, *args, **kwargs)
        for member in _members(self):
            member.whole_list = None

    keras.callbacks.CallbackList.on_train_begin = on_train_begin
    keras.callbacks.CallbackList.on_train_end = on_train_end


def _members(callbacks: keras.callbacks.CallbackList) -> list[ListMember]:
    return [callback for callback in callbacks.callbacks if isinstance(callback, ListMember)]
