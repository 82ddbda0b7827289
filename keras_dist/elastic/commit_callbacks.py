"""Callbacks that update and commit an elastic state during `fit`."""

from typing import Any

from keras_dist.training.session_callback import SessionCallback


class CommitStateCallback(SessionCallback):
    """Commits a state after a number of batches, and at the end of each epoch.

    After a rank has died, the weights are those of the last commit, and
    `fit(initial_epoch=state.epoch)` runs the interrupted epoch again from its first batch; see
    `UpdateBatchStateCallback` to skip batches.

    Collective: every rank must pass it to `fit`, after the other two callbacks, so that it commits
    their updates.

    Args:
        state: a `State`.
        batches_per_commit: number of batches between commits. Defaults to 1.
    """

    acts_on_job = "commits the state of all ranks"

    def __init__(self, state: Any, batches_per_commit: int = 1):
        super().__init__()
        self._state = state
        self._every = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._left = self._every
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._commit()

    def _commit(self) -> None:
        _ = self.model  # on JAX, Keras updates the model when this attribute is read
        self._state.commit()


class UpdateBatchStateCallback(SessionCallback):
    """Sets `state.batch` to the index of the last batch; 0 at the end of an epoch.

    `fit` does not use it: it runs an interrupted epoch again from its first batch. To skip batches,
    call `fit` for one epoch at a time, on data whose order depends on the epoch, such as
    `keras_dist.data.shard((x, y), seed=state.epoch)`, without its first `state.batch` batches
    (`skip` of `tf.data`). With another number of ranks these are other samples.

    Args:
        state: an `ObjectState` with the value `batch`.
    """

    def __init__(self, state: Any):
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.batch = 0


class UpdateEpochStateCallback(SessionCallback):
    """Sets `state.epoch` to the number of epochs that have ended, including earlier fits.

    A script may continue by `fit(initial_epoch=state.epoch)` or by
    `fit(epochs=epochs - state.epoch)`.

    Args:
        state: an `ObjectState` with the value `epoch`.
    """

    def __init__(self, state: Any):
        super().__init__()
        self._state = state
        self._offset: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._offset = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Computes the offset of the epochs of Keras from the first one."""
        if self._offset is None:
            self._offset = self._state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.epoch = (self._offset or 0) + epoch + 1
