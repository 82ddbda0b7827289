"""The learning rate over the epochs: schedules, and the warmup of large batches."""

from collections.abc import Callable
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist._compat.keras.optimizer_state import learning_rate, velocities
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER, innermost_optimizer

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier` in a range of epochs.

    Several of them, with ranges one after the other, make up a schedule.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a number, or a function of the epoch (a float, unless `staircase`).
        start_epoch: the first epoch, counted from 0, in which it acts. Defaults to 0.
        end_epoch: the first epoch in which it does not act any more. Defaults to none.
        staircase: whether a function is asked once an epoch, with the whole number, rather
            than at every batch, with `epoch + batch / steps_per_epoch`. Defaults to `True`.
        momentum_correction: whether the velocity of SGD with momentum is scaled by the
            ratio of new to old rate whenever the rate changes, since Keras' velocity holds
            the rate it was gathered with. A rate of 0 leaves the velocity as it is; the next
            one counts from the rate before. Defaults to `True`.
        steps_per_epoch: batches in an epoch. Defaults to what Keras finds out.

    Raises:
        ArgumentError: `initial_lr` is missing; in `fit`: the number of steps is not known,
            or the optimizer has a schedule of its own, or several rates.

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
                errors.explain(
                    runtime.where(),
                    "initial_lr to be a number",
                    "None",
                    "Pass the learning rate, for example 0.01 * keras_dist.size().",
                )
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
        self._rate_of_velocity = 0.0  # the last one that was not 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what a backup keeps of this callback."""
        return {"rate_of_velocity": self._rate_of_velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` has returned."""
        self._rate_of_velocity = state["rate_of_velocity"]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the rate can be set and that the steps of an epoch are known."""
        self._rate_of_velocity = 0.0
        optimizer = innermost_optimizer(self.model.optimizer)
        if isinstance(optimizer, MULTI_OPTIMIZER):
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    f"an optimizer with one learning rate, for {type(self).__name__}",
                    f"a {type(optimizer).__name__}",
                    "Give each of its optimizers a schedule from keras.optimizers.schedules.",
                )
            )
        if isinstance(
            learning_rate(optimizer),
            keras.optimizers.schedules.LearningRateSchedule,
        ):
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    "an optimizer whose learning rate is a number",
                    "a LearningRateSchedule",
                    "Use either a schedule in the optimizer or this callback.",
                )
            )
        steps = self.steps_per_epoch or self.params.get("steps")
        self._steps = steps or 1
        if steps is None and not self.staircase:
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    "to know the number of steps in an epoch",
                    "a data set of unknown length",
                    f"Pass steps_per_epoch to {type(self).__name__}.",
                )
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers the epoch, for the batches in it."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of this batch; in a staircase only before the first of an epoch."""
        if self._epoch < self.start_epoch or (
            self.end_epoch is not None and self._epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            self._set_rate(self._rate(self._epoch + batch / self._steps))
        elif batch == 0:
            self._set_rate(self._rate(self._epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the rate to the logs, under the name that Keras uses."""
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
            # The coefficient itself is a constant of the compiled step; the velocity is a
            # variable, and scaling it once is the same.
            for velocity in velocities(optimizer):
                velocity.assign(velocity * (after / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch from one rank's to that of all.

    With `n` ranks, `s` steps in an epoch and `w` warmup epochs the batch `b` of epoch `e`
    gets `initial_lr / n * (1 + (e + (b + 1) / s) * (n - 1) / w)`: from about
    `initial_lr / n` to exactly `initial_lr` at the last batch of the warmup. Afterwards it
    leaves the rate alone. With `steps_per_execution` the rate is that of the first of them.

    Args:
        initial_lr: the learning rate to reach, already scaled by `size()`.
        warmup_epochs: epochs until it is reached. Defaults to 5.
        momentum_correction: as in `LearningRateScheduleCallback`.
        steps_per_epoch: as in `LearningRateScheduleCallback`.
        verbose: 1 prints a line on rank 0 when the warmup is over. Defaults to 0.

    Raises:
        ArgumentError: as `LearningRateScheduleCallback`.

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
        """Notes how many ranks there are: if some die, the rate grows as it would have."""
        self._ranks = runtime.size()
        super().on_train_begin(logs)

    def _growth(self, epoch: float) -> float:
        ranks = self._ranks
        done = min(epoch + 1 / self._steps, self.warmup_epochs)
        return (1 + done * (ranks - 1) / self.warmup_epochs) / ranks

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the rate to the logs and says when the warmup is over."""
        last = self.warmup_epochs - 1 <= epoch < self.warmup_epochs
        if last:
            # With several steps an execution Keras has not called for the last of them.
            self._set_rate(self.initial_lr)
        super().on_epoch_end(epoch, logs)
        if last and self.verbose and runtime.rank() == 0:
            rate = _rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _rate_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(innermost_optimizer(optimizer).learning_rate))
