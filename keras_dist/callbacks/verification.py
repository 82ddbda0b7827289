"""Replicas are equal: during training, at its end and before writes; their batches are not."""

import collections
import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_dist import _backends, errors, runtime
from keras_dist.data import epochs
from keras_dist.data.nested import as_array
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_session import FirstStep, Order
from keras_dist.training.rank_exchanges import allgather_object
from keras_dist.training.replicas import average_statistics, broadcast_state, verify_once
from keras_dist.training.rounds_in_fit import end_rounds
from keras_dist.training.session_callback import VALIDATION, SessionCallback

WRITING, ENDING = "writing", "the end of a fit"


class AverageStatisticsCallback(SessionCallback):
    """Averages moving statistics, such as those of batch normalization, over the ranks.

    Each rank updates moving statistics from its own batches. The callback averages them before
    each validation and at the end of each epoch, so that every rank validates and saves the same
    model. Other non-trainable weights that differ between ranks are averaged as well, see
    `keras_dist.training.replicas.average_statistics`.

    Collective: every rank must pass the callback to `fit`.
    """

    agrees_on = VALIDATION

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.model.built:
            average_statistics(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        average_statistics(self.model)


class VerifyReplicas(SessionCallback):
    """Checks that weights and optimizer state are equal on all ranks.

    The callback checks every `every` epochs and at the end of `fit`. `keras_dist.callbacks()`
    includes an instance that checks at the end of `fit` only. `BackupAndRestore` and
    `ModelCheckpoint` check before each write; to repair replicas before they do, pass
    `VerifyReplicas(repair=True)` in front of them. The checks at the end of `fit` and before
    writes skip models whose optimizers do not reduce over all ranks.

    The ranks exchange digests of 16 bytes per variable. Computing them takes about 0.2 s per
    100 MB of weights and optimizer state. The callback must follow `AverageStatisticsCallback`,
    which makes moving statistics equal, as in `keras_dist.callbacks(VerifyReplicas())`.

    Collective: every rank must pass the callback to `fit`, with the same arguments.

    Args:
        every: number of epochs between checks, or `None` to check at the end of `fit` only.
            Defaults to 1.
        repair: whether to broadcast the root's state with a warning, rather than to raise, if
            the replicas differ. Defaults to `False`.
        root_rank: rank whose state repairs the replicas. Defaults to 0.

    Raises:
        MismatchError: the replicas differ; the message names variables and ranks. Raised on
            every rank, by `fit`.
        ArgumentError: `every` is not a positive integer; `root_rank` is not a rank.
    """

    def __init__(self, every: int | None = 1, repair: bool = False, root_rank: int = 0):
        super().__init__()
        number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if every is not None and not number:
            raise errors.ArgumentError("every to be a number of epochs", repr(every), "Pass 1.")
        runtime.communicator().index_of_root(root_rank)
        self.every = every
        self.order = Order.VERIFIES if every is None else Order.AS_GIVEN
        self.repair = repair
        self.root_rank = root_rank

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.every is not None and (epoch + 1) % self.every == 0:
            self._verify(WRITING)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if are_replicas(self.model):
            self._verify(ENDING)

    def _verify(self, moment: str) -> None:
        try:
            verify_once(self.model, moment)
        except errors.MismatchError as difference:
            if not self.repair:
                raise
            broadcast_state(self.model, self.root_rank)  # raises where the models differ
            self.warn(f"{difference} All ranks continue with the state of rank {self.root_rank}.")


def verify_before_writing(
    model: keras.Model, moment: str = WRITING, check: Callable[[keras.Model], None] | None = None
) -> dict[int, np.ndarray]:
    """Checks replicas before a file is written or removed. Collective; blocks."""
    if not are_replicas(model):
        return {}
    # Replicas differ within a round of local steps, and in non-trainable weights until these are
    # averaged.
    end_rounds(model)
    own = average_statistics(model)
    if check is None:
        verify_once(model, moment)
    else:
        check(model)
    return own


def are_replicas(model: keras.Model) -> bool:
    """Returns whether the distributed optimizers of a model reduce over all ranks."""
    optimizers = distributed_optimizers(model)
    job = runtime.fit_communicator()
    return bool(optimizers) and all(o._keras_dist.replicas() is job for o in optimizers)


class VerifyBatches(SessionCallback):
    """Warns if ranks start `fit` with the same first batch.

    Without sharding every rank trains on the same samples, and the job learns no more than a
    single process. The ranks compare digests of their first batches in one collective before the
    first step; later steps have no overhead. Data that `keras_dist.data` shards on all ranks is
    not compared, nor are tensors that numpy cannot hold, such as sparse and ragged ones.
    `keras_dist.callbacks()` includes this callback.

    Collective: every rank must pass the callback to `fit`.

    Args:
        root_rank: rank that warns. Defaults to 0.

    Raises:
        ArgumentError: `root_rank` is not a rank.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Makes the first step compare its batch with those of other ranks."""
        if runtime.fit_size() == 1 or epochs.fits.get().everywhere:
            return
        self.session.before_first_step(FirstStep.COMPARE, self._compare)

    def _compare(self, *arguments: Any) -> tuple[Any, ...]:
        count = self.session.model.steps_per_execution
        batch, arguments = _backends.active().first_batch(count, *arguments)
        digests = allgather_object(_digest(batch), "comparing the first batches")
        ranks: dict[bytes, list[str]] = collections.defaultdict(list)
        for rank, digest in enumerate(digests):
            if digest is not None:
                ranks[digest].append(str(rank))
        same = ["ranks " + ", ".join(group) for group in ranks.values() if len(group) > 1]
        if same:
            self.warn(
                "a different first batch on each rank",
                f"the same batch on {' and on '.join(same)}",
                "Shard the data with keras_dist.data.shard, or draw samples for each rank with "
                "keras_dist.data.sample. Ignore this warning if equal batches are intended.",
            )
        return arguments


def _digest(batch: Any) -> bytes | None:
    if batch is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for leaf in keras.tree.flatten(batch):
        try:
            array = as_array(leaf)
        except errors.ArgumentTypeError:  # a sparse tensor of torch
            return None
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    return digest.digest()
