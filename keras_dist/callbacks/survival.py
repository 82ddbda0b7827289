"""Training that continues when ranks die: takes over the root's role and the data of dead ranks."""

import secrets
from typing import Any

import keras

from keras_dist import _engine, config, errors, runtime
from keras_dist.data import epochs
from keras_dist.training.session_callback import SessionCallback


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
            raise too_few_ranks()
        epochs.reshard(names.index(self._name), len(names))
        if self.verbose and runtime.rank() == 0 and not self._prints:
            self._prints = True
            keras.utils.enable_interactive_logging()
            self._bar = keras.callbacks.ProgbarLogger()
            self._bar.set_params({**self.params, "verbose": 2})
            self._bar.set_model(self.model)
        if self._bar is not None:
            self._bar.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints the epoch if this rank has become the root."""
        if self._bar is not None:
            self._bar.on_epoch_end(epoch, logs)


def check_share_out(share_out: str) -> None:
    """Checks the argument `share_out`."""
    if share_out != "next epoch":
        raise errors.ArgumentError(
            runtime.where(),
            "share_out to be 'next epoch', the only value left",
            repr(share_out),
            "Omit it: the remaining ranks take over the data at the begin of the next epoch.",
        )


def too_few_ranks() -> errors.RankLostError:
    """Returns the error with which a job ends that has fewer ranks than it needs."""
    return errors.RankLostError(
        runtime.where(),
        f"at least {config.settings().min_np} ranks (--min-np)",
        f"{runtime.size()}: others have died",
        "Start the job again from its backup; keras-dist run --max-restarts does.",
    )
