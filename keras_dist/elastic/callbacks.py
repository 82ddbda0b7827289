"""Callbacks that keep an elastic state while Keras trains."""

from typing import Any

import keras

__all__ = ["CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state every so many batches, and at the end of each epoch.

    After a loss the weights are those of the last commit, and `fit(initial_epoch=state.epoch)` runs
    the interrupted epoch again from its first batch: `UpdateBatchStateCallback` says how to skip.

    Collective: every rank must pass it to `fit`, behind the other two, so that it commits what
    they have noted.

    Args:
        state: a `State`.
        batches_per_commit: after how many batches. Defaults to 1.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1):
        super().__init__()
        self._state = state
        self._every = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts anew."""
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits where it is time to."""
        self._left -= 1
        if self._left == 0:
            self._left = self._every
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits."""
        self._commit()

    def _commit(self) -> None:
        _ = self.model  # on JAX, Keras puts what has been learnt into the model when it is asked
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Notes in `state.batch` which batch was the last; 0 at the end of an epoch.

    Nothing uses it by itself: after a loss `fit` runs the interrupted epoch again from its first
    batch. To skip by hand, call `fit` for one epoch at a time, on data whose order follows from the
    epoch, such as `keras_dist.data.shard((x, y), seed=state.epoch)`, without its first
    `state.batch` batches (`skip` of `tf.data`). With other ranks these are other samples.

    Args:
        state: an `ObjectState` with `batch`.
    """

    def __init__(self, state: Any):
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the batch."""
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that there was none yet."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Notes in `state.epoch` how many epochs have ended, those before this `fit` among them.

    It makes no difference whether a script goes on by `fit(initial_epoch=state.epoch)` or by
    `fit(epochs=epochs - state.epoch)`.

    Args:
        state: an `ObjectState` with `epoch`.
    """

    def __init__(self, state: Any):
        super().__init__()
        self._state = state
        self._before: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets where the last `fit` began."""
        self._before = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sees from the first epoch by how much Keras counts otherwise."""
        if self._before is None:
            self._before = self._state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that the epoch has ended."""
        self._state.epoch = (self._before or 0) + epoch + 1
