"""Agreement on `stop_training`: all ranks stop after the same step."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import is_part_of_keras, model_of, module_of
from keras_dist.callbacks.root import RootOnly, overrides
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.training.fit_session import Order, is_stopped
from keras_dist.training.session_callback import SessionCallback

BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


class AgreeOnStoppingCallback(SessionCallback):
    """Stops all ranks if `model.stop_training` is set on any rank.

    The callback must follow all callbacks that may stop training. `keras_dist.callbacks()` puts it
    there, and `fit` moves it behind callbacks that are appended to that list. The ranks agree at
    the beginning and end of every epoch, and with `each_batch` after every batch, which costs a
    collective per step. Without agreement, the remaining ranks fail when a rank stops alone.

    Collective: every rank must pass the callback to `fit`.

    Args:
        each_batch: whether the ranks also agree after every batch. On JAX and torch Keras then
            calls all callbacks in the training thread, between the steps. Defaults to `False`.

    Raises:
        MismatchError: `each_batch` differs between the ranks; raised on every rank, by `fit`.
    """

    order = Order.STOPS

    def __init__(self, each_batch: bool = False):
        super().__init__()
        self.each_batch = each_batch
        if each_batch:
            # On the instance, only if needed: the presence of this hook makes Keras call the hooks
            # of all callbacks in the training thread, the only thread that may run collectives.
            self.on_train_batch_end = self._agree

    def asks(self, appended: Sequence[keras.callbacks.Callback]) -> tuple[bool, bool]:
        """Returns whether to agree after every batch, as made and because of appended callbacks."""
        return self.each_batch, may_stop_at_a_batch(appended)

    def told(self, answers: Sequence[tuple[bool, bool]]) -> "AgreeOnStoppingCallback":
        """Returns a callback that agrees after every batch if any rank asks for it."""
        as_made, appended = zip(*answers, strict=True)
        if len(set(as_made)) > 1:
            ranks = ", ".join(str(rank) for rank, each in enumerate(as_made) if each)
            raise errors.MismatchError(
                runtime.where(),
                "callbacks that may stop at a batch on every rank or on none",
                f"some on ranks {ranks} of {len(answers)} alone",
                "Pass the same callbacks on every rank. Wrap a callback that acts on one rank "
                "in keras_dist.callbacks.RootOnly.",
            )
        if self.each_batch or not any(appended):
            return self
        other = type(self)(each_batch=True)
        other.process_set = self.process_set
        return other

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agrees on a stop; Keras then stops after the first batch."""
        self._agree()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agrees on whether this epoch is the last."""
        self._agree()

    def _agree(self, batch: int = 0, logs: dict[str, Any] | None = None) -> None:
        model, comm = model_of(self), runtime.fit_communicator()
        stopped = np.array([is_stopped(model)], np.uint8)
        (any_rank,) = _engine.collectives.allreduce(
            comm,
            [stopped],
            ["the decision to stop"],
            _engine.OpOptions(_engine.ReduceOp.MAX),
            bucket_nbytes(comm),
        )
        if any_rank[0]:
            model.stop_training = True


def may_stop_at_a_batch(callbacks: Iterable[keras.callbacks.Callback]) -> bool:
    """Returns whether any of the callbacks has a batch hook that may stop training.

    Of Keras' callbacks only `TerminateOnNaN` does. User callbacks with batch hooks count.
    """
    return any(
        _may_stop(getattr(_inside(callback), hook))
        for callback in callbacks
        for hook in BATCH_HOOKS
        if overrides(_inside(callback), hook)
    )


def _inside(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    return _inside(callback.callback) if isinstance(callback, RootOnly) else callback


def _may_stop(hook: Any) -> bool:
    # The module of the hook, not of the class: a user's class may inherit a hook of Keras.
    module = module_of(hook)
    known = is_part_of_keras(hook) or module.startswith("keras_dist.")
    return not known or module == keras.callbacks.TerminateOnNaN.__module__
