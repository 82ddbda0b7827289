"""Ranks that train on the same batches are found before their first step."""

import collections
import hashlib
import warnings
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist.data import epochs
from keras_dist.data.nested import as_array
from keras_dist.training.trainer import watch_models

__all__ = ["VerifyBatches"]


class VerifyBatches(keras.callbacks.Callback):
    """Warns, on the root, where ranks begin a fit with the same batch.

    Data that is not shared out trains every rank on the same samples: the job takes as long as one
    process and learns no more. The ranks compare digests of their first batches, before the first
    step and in one meeting; later steps cost nothing. It is in `keras_dist.callbacks()`, and leaves
    data alone that `keras_dist.data` has shared out on all ranks. Sparse and ragged tensors of
    TensorFlow are not compared.

    Collective: every rank must pass it to `fit`.

    Args:
        root_rank: the rank that warns. Defaults to 0.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        runtime.communicator().index_of_root(root_rank)
        watch_models()  # who has wrapped no optimizer may have shared out no data either
        self.root_rank = root_rank

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Makes the first step look at its batch."""
        if runtime.size() == 1 or epochs.is_shared_out_everywhere():
            return
        model = self.model
        step = model.train_function

        def first_step(*arguments: Any) -> Any:
            model.train_function = step
            backend = _backends.active()
            batch, arguments = backend.first_batch(model.steps_per_execution, *arguments)
            self._compare(batch)
            return step(*arguments)

        model.train_function = first_step

    def _compare(self, batch: Any) -> None:
        comm = runtime.communicator()
        digests = _engine.collectives.allgather_object(
            comm, _digest(batch), operation="comparing the first batches"
        )
        ranks: dict[bytes, list[str]] = collections.defaultdict(list)
        for rank, digest in enumerate(digests):
            if digest is not None:
                ranks[digest].append(str(rank))
        same = ["ranks " + ", ".join(group) for group in ranks.values() if len(group) > 1]
        if same and comm.rank == self.root_rank:
            warnings.warn(
                errors.explain(
                    comm.where(),
                    "another first batch on each rank",
                    f"the same on {' and on '.join(same)}",
                    "Pass fit what keras_dist.data.shard makes of the data, a part for each rank, "
                    "or keras_dist.data.sample, which draws for each. If it is meant so, ignore "
                    "this.",
                ),
                RuntimeWarning,
                stacklevel=2,
            )


def _digest(batch: Any) -> bytes | None:
    if batch is None:
        return None
    found = hashlib.blake2b(digest_size=16)
    for leaf in keras.tree.flatten(batch):
        array = as_array(leaf)
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    return found.digest()
