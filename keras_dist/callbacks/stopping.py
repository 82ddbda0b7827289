"""All ranks stop after the same step: any of them may decide it, and then all do."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import is_part_of_keras, model_of, module_of
from keras_dist.callbacks.root import RootOnly, overrides
from keras_dist.ops.bucket_size import bucket_nbytes

__all__ = [
    "STOPS_EPOCH",
    "STOPS_JOB",
    "AgreeOnStoppingCallback",
    "is_stopped",
    "may_stop_at_a_batch",
]

# What Keras takes for a stop and what ends no more than an epoch, whose data is out, or a job,
# which goes on when it is started again.
STOPS_EPOCH, STOPS_JOB = "this epoch alone", "this job alone"

BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


class AgreeOnStoppingCallback(keras.callbacks.Callback):
    """Stops all ranks when `model.stop_training` has been set on any of them.

    It must stand behind all that may stop, so that it sees what they have decided;
    `keras_dist.callbacks()` puts it there, and `fit` puts it behind callbacks that were appended to
    that list. The ranks agree at the begin and end of every epoch. At
    batches they do so only where `each_batch` says that a callback may stop there, since it costs a
    meeting a step. A rank that stopped alone would leave the others with an error.

    Collective: every rank must pass it to `fit`.

    Args:
        each_batch: whether the ranks agree after every batch as well. On JAX and torch Keras
            then calls all callbacks between the steps, not beside them. Defaults to `False`.

    Raises:
        MismatchError: `each_batch` differs between the ranks; raised on every rank, by `fit`.
    """

    def __init__(self, each_batch: bool = False):
        super().__init__()
        self.each_batch = each_batch
        if each_batch:
            # On the instance: a class that has this hook makes Keras call those of all
            # callbacks in the thread that trains, the only one where ranks may meet.
            self.on_train_batch_end = self._agree

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that all ranks will meet at the same places."""
        comm = runtime.communicator()
        everyone = _engine.collectives.allgather_object(
            comm, self.each_batch, operation="agreeing on when to agree on stopping"
        )
        if len(set(everyone)) > 1:
            ranks = ", ".join(str(rank) for rank, each in enumerate(everyone) if each)
            raise errors.MismatchError(
                errors.explain(
                    comm.where(),
                    "callbacks that may stop at a batch on every rank or on none",
                    f"some on ranks {ranks} of {comm.size} alone",
                    "Pass the same callbacks on every rank; put those that are for one rank "
                    "into keras_dist.callbacks.RootOnly.",
                )
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agrees; Keras then stops after the first batch."""
        self._agree()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agrees on whether this was the last epoch."""
        self._agree()

    def after_batches(self) -> "AgreeOnStoppingCallback":
        """Returns such a callback that agrees after every batch as well."""
        return self if self.each_batch else type(self)(each_batch=True)

    @staticmethod  # `fit_plan` asks an instance: it is imported before this package
    def must_ask(callbacks: Iterable[keras.callbacks.Callback]) -> bool:
        """Tells whether any of some callbacks may stop training after a batch."""
        return may_stop_at_a_batch(callbacks)

    def _agree(self, batch: int = 0, logs: dict[str, Any] | None = None) -> None:
        model, comm = model_of(self), runtime.communicator()
        mine = np.array([is_stopped(model)], np.uint8)
        (any_rank,) = _engine.collectives.allreduce(
            comm,
            [mine],
            ["the decision to stop"],
            _engine.OpOptions(_engine.ReduceOp.MAX),
            bucket_nbytes(comm),
        )
        if any_rank[0]:
            model.stop_training = True


def is_stopped(model: keras.Model) -> bool:
    """Tells whether training has been stopped for good."""
    stop = model.stop_training
    return bool(stop) and all(stop is not one for one in (STOPS_EPOCH, STOPS_JOB))


def may_stop_at_a_batch(callbacks: Iterable[keras.callbacks.Callback]) -> bool:
    """Tells whether any of some callbacks has a hook at batches that may stop training.

    Of Keras' own only `TerminateOnNaN` does; what the hooks of others do cannot be known.
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
    # By where it is defined: a class of the user's may inherit the hook of one of Keras'.
    module = module_of(hook)
    known = is_part_of_keras(hook) or module.startswith("keras_dist.")
    return not known or module == keras.callbacks.TerminateOnNaN.__module__
