"""Training whose ranks change between two steps: processes join, and ranks that died are left."""

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _backends, _engine, config, errors, runtime
from keras_dist.callbacks.backup import ABOUT, BackupAndRestore, contents
from keras_dist.callbacks.survival import too_few_ranks
from keras_dist.data import epochs
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.runtime import growth, replacement
from keras_dist.storage.ownership import make_private_directory
from keras_dist.training import model_arrays
from keras_dist.training.model_state import has_weights
from keras_dist.training.ranks_change import RanksChange, SharedState, count, is_resuming, resumed

REACTIONS = ("stop", "continue", "replace")
MEMORY = pathlib.Path("the memory of the root")


class AdmitRanks(BackupAndRestore):
    """Lets processes join the job while it trains, between two steps.

    Requires `KERAS_DIST_JOIN_DIRECTORY`, in which the job announces itself; `keras-dist run
    --join-directory` sets it. A process that `keras-dist join` has started runs the script alone
    until it comes to `fit`. All ranks then agree, after a step, that it joins:

    - They stop `fit`, connect, and start it again at that step, on the new ranks as well, with the
      weights, optimizers, random states, metrics, counters and states of callbacks that the ranks
      have in memory. Callbacks resume as with `BackupAndRestore`.
    - Data of `keras_dist.data.shard` with a known order is shared out anew, from the next step on:
      each sample is used once in the epoch. The number of steps and the global batch size stay the
      same, and with them the learning rate; batches of each rank shrink.
    - New ranks are the last ones. Averages are over all ranks.

    With `on_failure="continue"`, where MPI supports it, training goes on in the same way without
    ranks that have died: the step of the death is completed, and from the next step on the others
    take over their data. With `"replace"` MPI then spawns a process for each, which joins as above;
    this needs one node and Open MPI 5 or newer. The death of such a process ends the job, and so
    does a death while one is on its way: Open MPI does not survive them. The batch on which a rank
    had not trained when it died is shared out as well, unless the rank died in the last step of the
    epoch. Of several batches in one step (`steps_per_execution`) that is the last one. Accumulated
    gradients that are not applied yet are lost whenever the ranks change.

    A collective per step is added, and on JAX and torch Keras calls all callbacks in the training
    thread, between the steps.

    Collective: every rank must pass the callback to `fit`, before the user's callbacks.

    Args:
        on_failure: `"stop"`, `"continue"` or `"replace"`, see above. Defaults to `"stop"`.

    Raises:
        ArgumentError: the job has process sets, or a timeline, or other users can access the
            directory; raised by `fit`.
        RankLostError: a rank has died where the job cannot continue; raised by `fit`.
        DataError: the training data cannot be distributed again; raised by `fit`.
    """

    in_memory = True

    def __init__(self, on_failure: str = "stop"):
        super().__init__("in memory", delete_checkpoint=False)
        if on_failure != "stop":
            runtime.survive_rank_loss()
        self._replaces = on_failure == "replace" and runtime.can_survive_rank_loss()
        self._rank, self._ranks = runtime.rank(), runtime.size()
        self._memory: dict[str, Any] | None = None

    def before_training(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Announces the job, and finds what the fit goes on from."""
        training = epochs.current()
        if training is None or training.data() is None:
            raise _cannot_share_out()
        if is_resuming() and not has_weights(self.model):
            # On TensorFlow, a model without an input is built from its data; others have been.
            _backends.active().build_from(self.model, iter(epochs.fit_arguments()["x"]))
        if directory := config.settings().join_directory:
            make_private_directory(pathlib.Path(directory), runtime.where())
        growth.announce()
        super().before_training(callbacks)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the fit on all ranks, if it goes on."""
        self._rank, self._ranks = runtime.rank(), runtime.size()
        super().on_train_begin(logs)
        self.when_all_have_been_called(resumed)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Lets ranks join after this step, if any are waiting."""
        super().on_train_batch_end(batch, logs)
        self.when_all_have_been_called(self._follow_ranks)

    def _keras_dist_save(self) -> None:
        self.when_all_have_been_called(self._follow_ranks)

    def _follow_ranks(self) -> None:
        """Ends the fit if the ranks change; it goes on with others."""
        self._memory = None
        comm = runtime.communicator()
        is_root = comm.rank == 0
        now = (
            comm.size != self._ranks,
            is_root and growth.is_asked(),
            is_root and replacement.is_lost(),
            comm.size < self._ranks and comm.size < config.settings().min_np,
            self._replaces and comm.size < growth.size_at_start() and not replacement.is_pending(),
            # The gradients of this step include those of ranks that have died since.
            comm.faults.update_size == self._ranks,
        )
        comm.faults.update_size = 0
        changes = [np.array(now, np.uint8)]
        options = _engine.OpOptions(_engine.ReduceOp.MAX)
        name = "whether the ranks change"
        (found,) = _engine.collectives.allreduce(
            comm, changes, [name], options, bucket_nbytes(comm)
        )
        died, waits, lost, few, replaces, complete = found
        # A rank that is out of data cannot take part in the following collectives.
        if not found[:-1].any() or comm.faults.joined is not None:
            return
        if lost or (died and replacement.is_pending()):
            raise _cannot_go_on()
        if few:
            raise too_few_ranks()
        if died or waits:
            self._change_ranks(bool(died), bool(complete))
        elif replaces:
            self._spawn()

    def _spawn(self) -> None:
        reason = growth.replace()
        if reason is not None:
            self._replaces = False
            runtime.notify(f"keras_dist does not replace the ranks that have died: {reason}.")

    def _change_ranks(self, died: bool, complete: bool) -> None:
        """Ends the fit if ranks have died or join; it goes on with those that there are then.

        Args:
            died: whether ranks have died.
            complete: whether those that died have contributed to the gradients of this step.
        """
        behind = self._dead() if died and not complete else []
        read = epochs.position_in_training(self._data, self._step) if self._has_begun else {}
        joiners, spawned = self._on_root(
            functools.partial(self._admissible, read), "to answer those that join", ""
        )
        if joiners or died:
            self._back_up()
            shared = epochs.history(), read, behind
            raise RanksChange(functools.partial(_change, joiners, spawned, shared))

    def _dead(self) -> list[int]:
        """Returns the ranks that have died in this fit. Collective: the others; blocks."""
        alive = _engine.collectives.allgather_object(
            runtime.communicator(), self._rank, operation="the search for ranks that have died"
        )
        return sorted(set(range(self._ranks)) - set(alive))

    def _admissible(self, read: epochs.Positions) -> tuple[list[str], bool]:
        """Returns the requests to join now, and whether by a spawned process. On the root.

        Others are refused. A spawned process joins alone.
        """
        facts, size, accepted = growth.facts(), runtime.size(), list[str]()
        requests = growth.requests()
        spawned = [name for name, asks in requests.items() if asks["spawned"]]
        if spawned:
            requests = {name: requests[name] for name in spawned[:1]}
        for name, asks in requests.items():
            reason = growth.difference(facts, asks["alike"])
            if reason is None and asks["fit"] != count():
                reason = f"a job that is in its fit number {count()}, not {asks['fit']}"
            limit = config.settings().max_np
            if reason is None and limit and size + len(accepted) >= limit:
                reason = f"a job that takes at most {limit} ranks (--max-np)"
            if reason is None and not epochs.suffice(size + len(accepted) + 1, read):
                if self._has_begun:
                    continue  # the next epoch may have enough for all
                reason = f"too few samples for more than {size + len(accepted)} ranks"
            if reason is None:
                accepted.append(name)
            else:
                growth.refuse(name, reason)
        return accepted, bool(spawned)

    def _has_backup(self) -> bool:
        return is_resuming()

    def _write(self) -> bool:
        self._memory = self._arrays()
        return True

    def _read(self) -> dict[str, Any] | None:
        if self._memory is None:
            return None
        about = json.loads(str(self._memory[ABOUT]))
        model_arrays.restore(self.model, about, self._memory, MEMORY)
        # The data has been shared out: no samples are repeated or left out.
        return contents({**about, "ranks": runtime.size()}, self._memory)


def _change(joiners: Sequence[str], spawned: bool, shared: SharedState) -> None:
    """Continues with those ranks that are alive and those that join. Collective; blocks."""
    if joiners:
        growth.accept(joiners, spawned, shared)
    _, positions, behind = shared
    epochs.reshard(runtime.rank(), runtime.size(), [positions], behind)
    if runtime.rank() == 0:
        keras.utils.enable_interactive_logging()


def _cannot_go_on() -> errors.RankLostError:
    return errors.RankLostError(
        runtime.where(),
        "a process that replaces a rank to join before another rank dies",
        "the death of one of them",
        "Start the job again from its backup; keras-dist run --max-restarts does.",
    )


def _cannot_share_out() -> errors.DataError:
    return errors.DataError(
        runtime.where(),
        "training data of keras_dist.data.shard with a known order, where ranks may join",
        "other data, which cannot be distributed again",
        "Pass arrays, a data set with a length or files of rows to keras_dist.data.shard, or "
        "do not set KERAS_DIST_JOIN_DIRECTORY.",
    )
