"""Learning rate callbacks: schedules by epoch, and warmup for large batches."""

from collections.abc import Callable
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist._compat.keras.optimizer_state import learning_rate, velocities
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER, innermost_optimizer
from keras_dist.training.session_callback import SessionCallback


class LearningRateScheduleCallback(SessionCallback):
    """Sets the learning rate to `initial_lr * multiplier` in a range of epochs.

    Several instances with consecutive ranges form a schedule.

    Args:
        initial_lr: base learning rate.
        multiplier: a number, or a function of the epoch (an `int` if `staircase`, otherwise a
            `float`) that returns a number.
        start_epoch: first epoch of the range, counted from 0. Defaults to 0.
        end_epoch: end of the range, exclusive. Defaults to `None`, no end.
        staircase: whether the function is called once per epoch, with the epoch, rather than
            before every batch, with `epoch + batch / steps_per_epoch`. Defaults to `True`.
        momentum_correction: whether the velocity of SGD with momentum is multiplied by the
            ratio of new to old rate when the rate changes, because Keras' velocity includes
            the rate. A rate of 0 leaves the velocity unchanged; the ratio at the next change
            is taken to the last rate other than 0. Defaults to `True`.
        steps_per_epoch: batches per epoch. Defaults to `None`, the number that Keras infers.

    Raises:
        ArgumentError: `initial_lr` is `None`. In `fit`: the number of steps is unknown, or the
            optimizer has a learning rate schedule or several learning rates.

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD, 2017 (arXiv:1706.02677), sections 2.2
        and 3.1.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise errors.ArgumentError(
                "initial_lr to be a number",
                "None",
                "Pass the learning rate, for example 0.01 * keras_dist.size().",
            )
        self.initial_lr = initial_lr
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._steps = steps_per_epoch or 1
        self._epoch = 0
        self._rate_of_velocity = 0.0  # the last rate other than 0

    def state_dict(self) -> dict[str, Any]:
        return {"rate_of_velocity": self._rate_of_velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rate_of_velocity = state["rate_of_velocity"]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the rate can be set and that the number of steps is known."""
        self._rate_of_velocity = 0.0
        optimizer = innermost_optimizer(self.model.optimizer)
        if isinstance(optimizer, MULTI_OPTIMIZER):
            raise errors.ArgumentError(
                f"an optimizer with one learning rate, for {type(self).__name__}",
                f"a {type(optimizer).__name__}",
                "Give each of its optimizers a schedule from keras.optimizers.schedules.",
            )
        if isinstance(learning_rate(optimizer), keras.optimizers.schedules.LearningRateSchedule):
            raise errors.ArgumentError(
                "an optimizer whose learning rate is a number",
                "a LearningRateSchedule",
                "Use either a schedule in the optimizer or this callback.",
            )
        steps = self.steps_per_epoch or self.planned.get("steps")
        self._steps = steps or 1
        if steps is None and not self.staircase:
            raise errors.ArgumentError(
                "a known number of steps per epoch",
                "a dataset of unknown length",
                f"Pass steps_per_epoch to {type(self).__name__}.",
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch for `on_train_batch_begin`."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of this batch; with `staircase` only before the first batch."""
        if self._epoch < self.start_epoch or (
            self.end_epoch is not None and self._epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            self._set_rate(self._rate(self._epoch + batch / self._steps))
        elif batch == 0:
            self._set_rate(self._rate(self._epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `learning_rate` to the logs."""
        if logs is not None:
            logs["learning_rate"] = _rate_of(self.model.optimizer)

    def _rate(self, epoch: float) -> float:
        factor = self.multiplier(epoch) if callable(self.multiplier) else self.multiplier
        return self.initial_lr * factor

    def _set_rate(self, rate: float) -> None:
        optimizer = innermost_optimizer(self.model.optimizer)
        before = _rate_of(optimizer) or self._rate_of_velocity
        optimizer.learning_rate = rate
        after = _rate_of(optimizer)
        self._rate_of_velocity = after or before
        if self.momentum_correction and after != before and before > 0 and after > 0:
            # The momentum coefficient is a constant of the compiled step. Scaling the velocity,
            # a variable, once has the same effect.
            for velocity in velocities(optimizer):
                velocity.assign(velocity * (after / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch from `initial_lr / size()` to `initial_lr`.

    With `n` ranks, `s` steps per epoch and `w` warmup epochs, batch `b` of epoch `e` has the
    rate `initial_lr / n * (1 + (e + (b + 1) / s) * (n - 1) / w)`. The last batch of the warmup
    has exactly `initial_lr`. The callback does not change the rate after the warmup. With
    `steps_per_execution`, all steps of an execution have the rate of the first.

    Args:
        initial_lr: target learning rate, already scaled by `size()`.
        warmup_epochs: number of warmup epochs; may be a fraction. Defaults to 5.
        momentum_correction: see `LearningRateScheduleCallback`. Defaults to `True`.
        steps_per_epoch: batches per epoch. Defaults to `None`, the number that Keras infers.
        verbose: 1 prints a line on rank 0 at the end of the warmup. Defaults to 0.

    Raises:
        ArgumentError: see `LearningRateScheduleCallback`.

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD, 2017 (arXiv:1706.02677), section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        super().__init__(
            initial_lr,
            self._growth,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose
        self._ranks = 1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stores the number of ranks: the warmup stays the same if ranks die during it."""
        self._ranks = runtime.fit_size()
        super().on_train_begin(logs)

    def _growth(self, epoch: float) -> float:
        ranks = self._ranks
        done = min(epoch + 1 / self._steps, self.warmup_epochs)
        return (1 + done * (ranks - 1) / self.warmup_epochs) / ranks

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate to the logs and prints a line at the end of the warmup."""
        last = self.warmup_epochs - 1 <= epoch < self.warmup_epochs
        if last:
            # With steps_per_execution, Keras does not call the hook of the last step.
            self._set_rate(self.initial_lr)
        super().on_epoch_end(epoch, logs)
        if last and self.verbose and runtime.fit_rank() == 0:
            rate = _rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _rate_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(innermost_optimizer(optimizer).learning_rate))
