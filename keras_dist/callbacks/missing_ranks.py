"""Ranks that are missing: out of data before others, for the rest of an epoch, or dead."""

import secrets
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import _engine, config, errors, runtime
from keras_dist._compat.keras.callbacks import model_of
from keras_dist._compat.keras.models import layers_of
from keras_dist._compat.keras.optimizer_state import batches_seen
from keras_dist._compat.keras.optimizers import innermost_optimizer
from keras_dist.data import epochs
from keras_dist.layers import SyncBatchNormalization
from keras_dist.training import layer_state
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_session import STOPS_EPOCH, Compute, Logs
from keras_dist.training.model_state import (
    clear_accumulators,
    optimizers_inside,
    replicated_variables,
)
from keras_dist.training.rank_exchanges import allgather_object
from keras_dist.training.replicas import broadcast_variables
from keras_dist.training.session_callback import SessionCallback

CHOICES = ("continue", "stop", "error")


class UnevenDataCallback(SessionCallback):
    """Allows ranks to have different numbers of batches in an epoch.

    - `"continue"`: the epoch ends when all ranks are out of data. Gradients are averaged over the
      ranks that still have data. At the end, weights and optimizer state of a rank that trained
      the last step are broadcast, with the moving statistics of `SyncBatchNormalization`, so that
      replicas are bitwise equal.
    - `"stop"`: the epoch ends on all ranks when the first rank is out of data. The other ranks
      detect it in their next reduction; the step in progress is reverted by a broadcast from the
      rank that did not start it. Metrics include its batch.
    - `"error"`: like `"stop"`, then raises `DataError` on every rank.

    Other non-trainable weights stay different until they are averaged, see
    `AverageStatisticsCallback`. With gradient accumulation, ranks continue at the accumulation step
    of the rank whose state they receive; gradients accumulated at a different step are discarded.
    An epoch with equal numbers of batches costs two collectives.

    While a rank is out of data, the others may only reduce gradients. A callback that runs other
    collectives in batch hooks, such as `BackupAndRestore(save_freq=100)`, raises on every rank.

    Collective: every rank must pass the callback to `fit`, with the same argument.

    Args:
        uneven: `"continue"`, `"stop"` or `"error"`. Defaults to `"continue"`.

    Raises:
        ArgumentError: `uneven` is unknown.
        DataError: ranks have different numbers of batches, with `"error"`; raised on every
            rank, by `fit`.
    """

    def __init__(self, uneven: str = "continue"):
        super().__init__()
        if uneven not in CHOICES:
            raise errors.ArgumentError(
                f"uneven to be one of {', '.join(CHOICES)}",
                repr(uneven),
                "Omit it for 'continue', which trains until all ranks are out of data.",
            )
        self.uneven = uneven
        # What the fit around this one does where a rank is missing.
        self._outside: dict[_engine.Communicator, Any] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prepares the end of the steps, which precedes validation and has no hook."""
        if runtime.fit_size() == 1:
            return
        nested = _engine.progress.is_nested("fit")
        for comm in runtime.fit_communicators():
            self._outside[comm] = comm.faults.on_missing if nested else None
            comm.faults.on_missing = None if self.uneven == "continue" else self._stop
        self.session.transform_logs(Logs.END_STEPS, self._end_steps)

    def _stop(self) -> None:
        # Called within the step, in any thread. Does not override a permanent stop.
        if not model_of(self).stop_training:
            model_of(self).stop_training = STOPS_EPOCH

    def _end_steps(self, logs: Any, _: Compute) -> Any:
        """Waits until all ranks are out of data and makes the replicas equal."""
        model, job = self.model, runtime.fit_communicator()
        absences = _engine.collectives.join_all(runtime.fit_communicators(), takes_named=False)
        for comm in absences:
            comm.faults.on_missing = self._outside.pop(comm, None)
        if model.stop_training is STOPS_EPOCH:
            model.stop_training = False
        optimizers = distributed_optimizers(model)
        done = [_steps(optimizer) for optimizer in optimizers]
        everyone = allgather_object(done, f"the end of an epoch with uneven={self.uneven!r}")
        at = {rank: place for place, rank in enumerate(job.ranks)}
        out = {comm.ranks[p] for comm, each in absences.items() if each for p in each.first_out}
        for number, optimizer in enumerate(optimizers):
            ranks = optimizer._keras_dist.communicator()
            if ranks is None:
                continue
            steps = [everyone[at[rank]][number] for rank in ranks.ranks]
            if absences[ranks] is None and len(set(steps)) == 1:
                continue
            root = self._root(absences[ranks], steps)
            variables = [*replicated_variables(optimizer), *_common_statistics(model)]
            broadcast_variables(ranks, variables, ranks.ranks[root])
            if (steps[ranks.rank] - steps[root]) % _passes(optimizer):
                clear_accumulators([optimizer, *optimizers_inside(optimizer)])
            layer_state.write(model, None)
            # On TensorFlow a step that finds no data in its iterator may be counted.
            if _passes(optimizer) > 1:
                fewest = min(steps)
                out.update(rank for rank, n in zip(ranks.ranks, steps, strict=True) if n == fewest)
        if self.uneven == "error":
            self._raise_if(out)
        return logs

    def _root(self, absence: _engine.JoinedRanks | None, steps: Sequence[int]) -> int:
        """Returns the index of the rank whose state is broadcast."""
        everywhere = tuple(range(len(steps)))
        if self.uneven == "continue":
            return max(absence.here if absence else everywhere, key=lambda place: steps[place])
        return min(absence.first_out if absence else everywhere, key=lambda place: steps[place])

    def _raise_if(self, out: set[int]) -> None:
        """Raises on all ranks of the job if any rank was out of data early."""
        everyone = allgather_object(out, "comparing the lengths of an epoch")
        ranks = ", ".join(map(str, sorted(set().union(*everyone))))
        if not ranks:
            return
        raise errors.DataError(
            "as many batches on every rank, with uneven='error'",
            f"ranks {ranks} out of data before others",
            "Shard the data with keras_dist.data.shard, or pass uneven='continue' or "
            "'stop' to keras_dist.callbacks.",
        )


def _steps(optimizer: Any) -> int:
    """Returns the number of batches of an optimizer; `iterations` counts updates only."""
    return int(batches_seen(innermost_optimizer(optimizer)))


def _passes(optimizer: Any) -> int:
    every = [optimizer, *optimizers_inside(optimizer)]
    return max(optimizer.gradient_accumulation_steps or 1 for optimizer in every)


def _common_statistics(model: keras.Model) -> list[Any]:
    """Returns the moving statistics that ranks without data have not updated with the others."""
    layers = [each for each in layers_of(model) if isinstance(each, SyncBatchNormalization)]
    return [each for layer in layers for each in (layer.moving_mean, layer.moving_variance)]


class GoOnWithoutLostRanks(SessionCallback):
    """Continues training on the remaining ranks when a rank dies, without loss of a step.

    Requires Open MPI 5 or newer, started by `mpiexec --with-ft ulfm`, which
    `keras-dist run --on-failure continue` does. Otherwise the root logs a warning, and the job ends
    when a rank dies. The remaining ranks still have their gradients and reduce the step in which a
    rank died. Afterwards:

    - The remaining ranks are renumbered from 0 to `size() - 1`, in their order. If the root died,
      the next rank becomes the root: it prints a line per epoch and writes checkpoints.
    - Averages are over the remaining ranks.
    - From the next epoch on, arrays of `keras_dist.data.shard` are resharded. The number of steps
      and the global batch size stay the same, so batches of each rank grow and the learning rate
      stays right. The rest of the dead rank's data of the current epoch is skipped. Other data is
      not resharded: each rank keeps its shard, and the global batch shrinks by the dead rank's
      batch.

    An exception on a rank still ends the job. So does a death before `keras_dist.init` returns,
    with process sets, between the last step of an uneven epoch and the next collective, and with
    Adasum unless the number of remaining ranks is a power of two.

    Collective: every rank must pass the callback to `fit`, behind `MetricAverageCallback`.

    Args:
        verbose: whether a rank that becomes the root prints. Defaults to `True`.
        share_out: when the data of a dead rank is taken over. Only `"next epoch"`, the default, is
            left; the value `"at once"` has been removed.

    Raises:
        ArgumentError: `share_out` is not `"next epoch"`.
        RankLostError: fewer ranks than `KERAS_DIST_MIN_NP` are left; raised by `fit`, at the begin
            of an epoch.
    """

    acts_on_job = "goes on with those that are left"

    def __init__(self, verbose: bool = True, share_out: str = "next epoch"):
        super().__init__()
        check_share_out(share_out)
        runtime.survive_rank_loss()
        self.verbose = verbose
        self._name = secrets.token_hex(8)
        self._was_silent = False
        self._bar: keras.callbacks.Callback | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stores whether this rank prints already."""
        self._bar = None
        is_root = runtime.rank() == 0
        if is_root and self._was_silent:
            keras.utils.enable_interactive_logging()
        self._prints = is_root
        self._was_silent |= not is_root

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reshards data, and makes rank 0 print, if ranks died in the last epoch."""
        # Ranks may detect a death at different times; the gathered list is the same on all ranks.
        names = _engine.collectives.allgather_object(
            runtime.communicator(), self._name, operation="counting the ranks"
        )
        if len(names) < config.settings().min_np:
            raise errors.RankLostError(
                f"at least {config.settings().min_np} ranks (--min-np)",
                f"{runtime.size()}: others have died",
                "Start the job again from its backup; keras-dist run --max-restarts does.",
            )
        epochs.reshard(names.index(self._name), len(names))
        if self.verbose and runtime.rank() == 0 and not self._prints:
            self._prints = True
            keras.utils.enable_interactive_logging()
            self._bar = keras.callbacks.ProgbarLogger()
            self._bar.set_params({**self.planned, "verbose": 2})
            self._bar.set_model(self.model)
        if self._bar is not None:
            self._bar.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._bar is not None:
            self._bar.on_epoch_end(epoch, logs)


def check_share_out(share_out: str) -> None:
    """Checks the argument `share_out`."""
    if share_out != "next epoch":
        raise errors.ArgumentError(
            "share_out to be 'next epoch', the only value left",
            repr(share_out),
            "Omit it: the remaining ranks take over the data at the begin of the next epoch.",
        )
