"""Ranks whose data ends earlier than that of others: nobody waits for them in vain."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import model_of
from keras_dist._compat.keras.models import LOGS
from keras_dist._compat.keras.optimizer_state import batches_seen
from keras_dist._compat.keras.optimizers import innermost_optimizer
from keras_dist.callbacks.stopping import STOPS_EPOCH
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.model_state import accumulators, optimizers_inside, replicated_variables
from keras_dist.training.replicas import broadcast_variables

__all__ = ["UnevenDataCallback"]

CHOICES = ("continue", "stop", "error")


class UnevenDataCallback(keras.callbacks.Callback):
    """Lets ranks have different numbers of batches in an epoch.

    - `"continue"`: the epoch goes on until all ranks are out of data. Gradients are averaged over
      the ranks that still have some. At the end the others receive weights and optimizer state
      of a rank that was there to the last step, so that replicas are equal to the bit.
    - `"stop"`: the epoch ends on all ranks when the first is out of data. The others notice in
      their next reduction; the step that they have begun is undone on them, by the state of the
      rank that has not made it. Their metrics have seen its batch.
    - `"error"`: as `"stop"`, and then a `DataError` on every rank.

    Weights that are not trained keep what each rank has gathered until they are averaged, see
    `AverageStatisticsCallback`. Under gradient accumulation ranks go on at the place of the one
    whose state they receive; what a rank has gathered at another place, and not applied, is
    dropped there. An epoch in which all ranks have as many batches costs two meetings.

    While a rank is out of data the others may only reduce: a callback that writes or meets at
    batches, such as `BackupAndRestore(save_freq=100)`, is an error on every rank.

    Collective: every rank must pass it to `fit`, with the same argument.

    Args:
        uneven: one of the above. Defaults to `"continue"`.

    Raises:
        ArgumentError: `uneven` is none of them.
        DataError: ranks have different numbers of batches, with `"error"`; raised on every
            rank, by `fit`.
    """

    def __init__(self, uneven: str = "continue"):
        super().__init__()
        if uneven not in CHOICES:
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    f"uneven to be one of {', '.join(CHOICES)}",
                    repr(uneven),
                    "'continue' goes on until all ranks are out of data.",
                )
            )
        self.uneven = uneven

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prepares for the end of the steps, which comes before validation and has no hook."""
        if runtime.size() == 1:
            return
        model = self.model
        before = model.__dict__.get(LOGS)
        for comm in runtime.communicators():
            comm.faults.on_missing = None if self.uneven == "continue" else self._stop

        def result(logs: Any) -> Any:
            model.__dict__.pop(LOGS)
            if before is not None:
                object.__setattr__(model, LOGS, before)
            self._end_steps()
            return getattr(model, LOGS)(logs)

        # The first that Keras does on every backend when the steps of an epoch have ended, also
        # when there were none. On the instance, past Keras' tracking.
        object.__setattr__(model, LOGS, result)

    def _stop(self) -> None:
        # From within the step, in whatever thread. A stop for good is not to be forgotten.
        if not model_of(self).stop_training:
            model_of(self).stop_training = STOPS_EPOCH

    def _end_steps(self) -> None:
        """Waits until all ranks are out of data, and makes the replicas equal again."""
        model, job = self.model, runtime.communicator()
        absences = _engine.collectives.join_all(runtime.communicators())
        for comm in absences:
            comm.faults.on_missing = None
        if model.stop_training is STOPS_EPOCH:
            model.stop_training = False
        optimizers = distributed_optimizers(model)
        everyone = _engine.collectives.allgather_object(
            job,
            [_steps(optimizer) for optimizer in optimizers],
            operation=f"the end of an epoch with uneven={self.uneven!r}",
        )
        out = {comm.ranks[p] for comm, each in absences.items() if each for p in each.first_out}
        for number, optimizer in enumerate(optimizers):
            ranks = optimizer._keras_dist.communicator()
            if ranks is None:
                continue
            steps = [everyone[rank][number] for rank in ranks.ranks]
            if absences[ranks] is None and len(set(steps)) == 1:
                continue
            _follow(optimizer, ranks, steps, self._root(absences[ranks], steps))
            # On TensorFlow a step that finds no data in its iterator may be counted all the same.
            if _passes(optimizer) > 1:
                fewest = min(steps)
                out.update(rank for rank, n in zip(ranks.ranks, steps, strict=True) if n == fewest)
        if self.uneven == "error":
            self._raise_if(out)

    def _root(self, absence: _engine.JoinedRanks | None, steps: Sequence[int]) -> int:
        """Returns the place of the rank whose state all receive: it made the steps that count."""
        everywhere = tuple(range(len(steps)))
        if self.uneven == "continue":
            return max(absence.here if absence else everywhere, key=lambda place: steps[place])
        return min(absence.first_out if absence else everywhere, key=lambda place: steps[place])

    def _raise_if(self, out: set[int]) -> None:
        """Raises where ranks were out of data early: on all, whatever the process sets."""
        job = runtime.communicator()
        everyone = _engine.collectives.allgather_object(
            job, out, operation="comparing the lengths of an epoch"
        )
        ranks = ", ".join(map(str, sorted(set().union(*everyone))))
        if not ranks:
            return
        raise errors.DataError(
            errors.explain(
                job.where(),
                "as many batches on every rank, with uneven='error'",
                f"ranks {ranks} out of data before others",
                "Share the data out with keras_dist.data.shard, or pass uneven='continue' or "
                "'stop' to keras_dist.callbacks.",
            )
        )


def _steps(optimizer: Any) -> int:
    """Returns how many batches an optimizer has seen; `iterations` counts the updates alone."""
    return int(batches_seen(innermost_optimizer(optimizer)))


def _passes(optimizer: Any) -> int:
    every = [optimizer, *optimizers_inside(optimizer)]
    return max(one.gradient_accumulation_steps or 1 for one in every)


def _follow(optimizer: Any, comm: _engine.Communicator, steps: Sequence[int], root: int) -> None:
    """Gives all ranks of an optimizer the weights and the state that it has on one of them.

    Args:
        optimizer: a distributed optimizer.
        comm: its ranks.
        steps: how many batches it has seen on each.
        root: the place of the rank whose state all receive.
    """
    broadcast_variables(comm, replicated_variables(optimizer), comm.ranks[root])
    if (steps[comm.rank] - steps[root]) % _passes(optimizer):
        for variable in accumulators([optimizer, *optimizers_inside(optimizer)]):
            variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
