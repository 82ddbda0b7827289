"""The base class of callbacks that take part in sessions."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist._compat.keras.callbacks import model_of
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.fit_session import FitSession, Order, SessionMember, running_in
from keras_dist.training.keras_hooks import watch_models

# What callbacks agree on that are collective in validation.
VALIDATION = ("validation_data", "validation_freq")


class SessionCallback(SessionMember, keras.callbacks.Callback):
    """A callback that takes part in sessions: every rank must pass it to `fit`."""

    #: arguments of `fit` that must be equal on all ranks, besides those of epochs
    agrees_on: tuple[str, ...] = ()
    #: whether `evaluate` with it is one of all ranks
    evaluates_together = False
    order = Order.AS_GIVEN
    #: the rank that acts for all, if there is one
    root_rank: Any = None
    #: the ranks of the fit; `None`: all, or those of other callbacks in the list
    process_set: ProcessSet | None = None

    #: what the callback does for all ranks of the job, in words, so that a set cannot have it
    acts_on_job = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Patches Keras, once."""
        watch_models()
        return super().__new__(cls)

    @property
    def session(self) -> FitSession:
        """The session of the running call; made here if it began before Keras was patched."""
        model = model_of(self)
        return running_in(model) or FitSession(model).__enter__()

    @property
    def planned(self) -> dict[str, Any]:
        """What `fit` says of its epochs and steps; a list of callbacks in a loop may not."""
        found: dict[str, Any] | None = self.params
        return found or {}

    def train_within(self, process_set: ProcessSet) -> None:
        """Makes a process set the ranks of the fit; its first rank is the root in place of 0."""
        self.root_rank, self.process_set = self.root_within(process_set), process_set

    def root_within(self, process_set: ProcessSet) -> Any:
        """Returns the root of a fit on a process set; raises if the callback cannot act there."""
        if self.acts_on_job:
            raise errors.ArgumentError(
                "callbacks that act within a process set",
                f"a {type(self).__name__} that {self.acts_on_job}",
                "Omit it, or train on all ranks.",
            )
        comm, root = runtime.communicator(process_set), self.root_rank
        if root == 0 and 0 not in comm.ranks:
            return comm.ranks[0]
        if root is not None:
            comm.index_of_root(root)
        return root

    def asks(self, appended: Sequence[keras.callbacks.Callback]) -> Any:
        """Returns what this rank tells the others, given the callbacks that a user has appended."""
        return None

    def told(self, answers: Sequence[Any]) -> None:
        """Takes what all ranks have told, before Keras looks at the hooks of the callback."""

    def enter(self, session: FitSession) -> None:
        """Takes part in a fit, before `on_train_begin` of any callback."""

    def warn(self, *parts: str) -> None:
        """Warns on the root, by a message or by its parts as of an error."""
        if runtime.rank() == self.root_rank:
            text = str(errors.KerasDistError(*parts))
            warnings.warn(text, RuntimeWarning, stacklevel=3)
