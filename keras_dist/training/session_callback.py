"""The base class of callbacks that take part in sessions."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_dist import runtime
from keras_dist._compat.keras.callbacks import model_of
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.fit_session import FitSession, Member, Order, session_of
from keras_dist.training.keras_hooks import watch_models


class SessionCallback(Member, keras.callbacks.Callback):
    """A callback that takes part in sessions: every rank must pass it to `fit`."""

    #: whether validation must be equal on all ranks, because the callback is collective in it
    is_collective_in_validation = False
    order = Order.AS_GIVEN
    #: the rank that acts for all, if there is one
    root_rank: Any = None
    #: the ranks of the fit; `None`: all, or those of other callbacks in the list
    process_set: ProcessSet | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Patches Keras, once."""
        watch_models()
        return super().__new__(cls)

    @property
    def session(self) -> FitSession:
        """The running call of a method of the model."""
        return session_of(model_of(self))

    def train_within(self, process_set: ProcessSet) -> None:
        """Makes a process set the ranks of the fit; its first rank is the root in place of 0."""
        self.process_set = process_set
        comm, root = runtime.communicator(process_set), self.root_rank
        if root == 0 and 0 not in comm.ranks:
            self.root_rank = comm.ranks[0]
        elif root is not None:
            comm.index_of_root(root)

    def agreement(self, arguments: dict[str, Any]) -> dict[str, str]:
        """Returns what must be equal in the `fit` of all ranks, as text by name."""
        if not self.is_collective_in_validation:
            return {}
        validates = arguments["validation_data"] is not None or arguments["validation_split"]
        return {
            "validation_data": "some" if validates else "none",
            "validation_freq": str(arguments["validation_freq"]) if validates else "none",
        }

    def asks(self, appended: Sequence[keras.callbacks.Callback]) -> Any:
        """Returns what this rank tells the others, given the callbacks that a user has appended."""
        return None

    def told(self, answers: Sequence[Any]) -> "SessionCallback":
        """Returns the callback to use, given what all ranks have told."""
        return self

    def enter(self, session: FitSession) -> None:
        """Takes part in a fit, before `on_train_begin` of any callback."""

    def after_hook(self, work: Callable[[], None]) -> None:
        """Calls a function after the current hook of all callbacks; at once outside of a hook."""
        self.session.after_hook(work)
