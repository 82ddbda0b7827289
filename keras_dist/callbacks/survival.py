"""Training that goes on when ranks die: whose duties, whose data, said by whom."""

import secrets
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.data import epochs
from keras_dist.ops.bucket_size import bucket_nbytes

__all__ = ["GoOnWithoutLostRanks"]

SHARE_OUT = ("next epoch", "at once")


class GoOnWithoutLostRanks(keras.callbacks.Callback):
    """Lets the other ranks go on when one dies, in place: no step is lost, nothing is rolled back.

    Needs Open MPI 5 or newer, started by `mpiexec --with-ft ulfm`, which
    `keras-dist run --on-failure continue` does; elsewhere the root says so, and the job ends when a
    rank dies. The step in which a rank died is reduced among the others, who have their gradients
    still. From then on:

    - The others are numbered anew, 0 to `size() - 1`, in their order. If the root died the next
      rank takes its place: it prints, a line an epoch, and writes checkpoints.
    - Averages are those of the ranks that are left.
    - From the next epoch on, arrays that `keras_dist.data.shard` shares out are shared out anew:
      the number of steps and the samples in a step of all ranks stay, so each rank's batches grow,
      and the learning rate stays right as it is. What the dead still had to do in the epoch of its
      death is left out; with `share_out="at once"` the others do it, from the first batch on that
      no rank has read ahead. Other data is not shared out anew: each rank keeps its part, and the
      batch of all ranks is smaller by that of the dead.

    A rank that raises is not lost: its error ends the job. So does a death before
    `keras_dist.init` has returned, where there are process sets, between the end of an uneven
    epoch's steps and what follows, and under Adasum, unless a power of two of ranks is left.

    Collective: every rank must pass it to `fit`, behind `MetricAverageCallback`.

    Args:
        verbose: whether a rank that becomes the root prints. Defaults to `True`.
        share_out: `"next epoch"` or `"at once"`. For the latter the ranks ask each other after
            every batch, which costs a meeting a step, and on JAX and torch Keras calls all
            callbacks between the steps, not beside them. Defaults to `"next epoch"`.

    Raises:
        ArgumentError: `share_out` is neither.
    """

    def __init__(self, verbose: bool = True, share_out: str = "next epoch"):
        super().__init__()
        if share_out not in SHARE_OUT:
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    f"share_out to be one of {', '.join(map(repr, SHARE_OUT))}",
                    repr(share_out),
                    "'at once' costs a meeting a step.",
                )
            )
        runtime.outlive_ranks()
        self.verbose = verbose
        self.share_out = share_out
        if share_out == "at once":
            # On the instance: a class that has this hook makes Keras call those of all
            # callbacks in the thread that trains, the only one where ranks may meet.
            self.on_train_batch_end = self._share_out_at_once
        self._name = secrets.token_hex(8)
        self._was_silent = False
        self._bar: keras.callbacks.Callback | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes whether this rank prints already."""
        self._bar = None
        is_root = runtime.rank() == 0
        if is_root and self._was_silent:
            keras.utils.enable_interactive_logging()
        self._prints = is_root
        self._was_silent |= not is_root

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Shares data and duties out anew, where ranks have died in the last epoch."""
        # One rank may hear of a death before another. What they gather is the same on all.
        names = _engine.collectives.allgather_object(
            runtime.communicator(), self._name, operation="counting the ranks"
        )
        epochs.share_out(names.index(self._name), len(names))
        self._count = len(names)
        if self.verbose and runtime.rank() == 0 and not self._prints:
            self._prints = True
            keras.utils.enable_interactive_logging()
            self._bar = keras.callbacks.ProgbarLogger()
            self._bar.set_params({**self.params, "verbose": 2})
            self._bar.set_model(self.model)
        if self._bar is not None:
            self._bar.on_epoch_begin(epoch, logs)

    def _share_out_at_once(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Shares out what is left of the epoch, if ranks have died since that was done last."""
        comm = runtime.communicator()
        mine = [np.array([comm.size != self._count], np.uint8)]
        name = "whether ranks have died"
        options = _engine.OpOptions(_engine.ReduceOp.MAX)
        (died,) = _engine.collectives.allreduce(comm, mine, [name], options, bucket_nbytes(comm))
        # A rank that is out of data could not come to what follows.
        if not died[0] or comm.faults.joined is not None:
            return
        with epochs.held():
            told = _engine.collectives.allgather_object(
                comm, (self._name, epochs.positions()), operation="sharing out the epoch"
            )
            names = [name for name, _ in told]
            epochs.share_out(names.index(self._name), len(names), [read for _, read in told])
        self._count = len(names)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints, as the root that this rank has become."""
        if self._bar is not None:
            self._bar.on_epoch_end(epoch, logs)
