"""Detection of ranks that train on the same batches, before the first step."""

import collections
import hashlib
import warnings
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist.data import epochs
from keras_dist.data.nested import as_array
from keras_dist.training.fit_session import FirstStep
from keras_dist.training.session_callback import SessionCallback


class VerifyBatches(SessionCallback):
    """Warns if ranks start `fit` with the same first batch.

    Without sharding every rank trains on the same samples, and the job learns no more than a
    single process. The ranks compare digests of their first batches in one collective before the
    first step; later steps have no overhead. Data that `keras_dist.data` shards on all ranks is
    not compared, nor are sparse and ragged tensors of TensorFlow. `keras_dist.callbacks()`
    includes this callback.

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
        if runtime.fit_size() == 1 or epochs.is_sharded_everywhere():
            return
        self.session.before_first_step(FirstStep.COMPARE, self._compare)

    def _compare(self, *arguments: Any) -> tuple[Any, ...]:
        comm, count = runtime.fit_communicator(), self.session.model.steps_per_execution
        batch, arguments = _backends.active().first_batch(count, *arguments)
        digests = _engine.collectives.allgather_object(
            comm, _digest(batch), operation="comparing the first batches"
        )
        ranks: dict[bytes, list[str]] = collections.defaultdict(list)
        for rank, digest in enumerate(digests):
            if digest is not None:
                ranks[digest].append(str(rank))
        same = ["ranks " + ", ".join(group) for group in ranks.values() if len(group) > 1]
        if same and runtime.rank() == self.root_rank:
            warnings.warn(
                errors.explain(
                    comm.where(),
                    "a different first batch on each rank",
                    f"the same batch on {' and on '.join(same)}",
                    "Shard the data with keras_dist.data.shard, or draw samples for each rank with "
                    "keras_dist.data.sample. Ignore this warning if equal batches are intended.",
                ),
                RuntimeWarning,
                stacklevel=2,
            )
        return arguments


def _digest(batch: Any) -> bytes | None:
    if batch is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for leaf in keras.tree.flatten(batch):
        array = as_array(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    return digest.digest()
