"""Private and undocumented names of TensorFlow."""

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    interleave_op,
    map_op,
    prefetch_op,
    readers,
    shuffle_op,
)
from tensorflow.python.eager import record

from keras_dist._compat.contract import Name

__all__ = [
    "CONTRACT",
    "batch_of",
    "eager_tensor",
    "functions_of",
    "input_of",
    "is_interleave",
    "is_nondeterministic",
    "is_prefetch",
    "is_recorded",
    "reshuffles",
    "seeds_of",
    "serialized",
    "shuffle_buffer_of",
    "stages_of",
    "version",
]


def version() -> str:
    """Returns the name and the version of TensorFlow."""
    return f"TensorFlow {tf.__version__}"


def is_recorded() -> bool:
    """Tells whether a tape may record what runs now."""
    return bool(record.could_possibly_record())


def eager_tensor(array: Any, device: str | None) -> Any:
    """Returns an array as a tensor on a device, in a fifth of the time of `tf.constant`."""
    return _eager_class()(array, device, None)


@functools.cache
def _eager_class() -> Any:
    # Not asked for at import: threads and devices can be chosen until TensorFlow makes a tensor.
    return type(tf.constant(0))


# --- Pipelines of tf.data: how they were made


def stages_of(dataset: Any) -> Iterator[Any]:
    """Yields the transformations of a pipeline, from the last to the sources."""
    yield dataset
    for source in dataset._inputs():
        yield from stages_of(source)


def functions_of(stage: Any) -> list[Any]:
    """Returns the functions given to a transformation."""
    return [function.function for function in stage._functions()]


def input_of(stage: Any) -> Any:
    """Returns what a transformation with one input transforms."""
    return stage._input_dataset


def is_prefetch(stage: Any) -> bool:
    """Tells whether a transformation is a `prefetch`."""
    return isinstance(stage, prefetch_op._PrefetchDataset)


def is_interleave(stage: Any) -> bool:
    """Tells whether a transformation is an `interleave` in several threads."""
    return isinstance(stage, interleave_op._ParallelInterleaveDataset)


def is_nondeterministic(stage: Any) -> bool:
    """Tells whether a parallel `map`, `batch` or reader was made with `deterministic=False`."""
    return vars(stage).get("_deterministic") == "false"  # only parallel stages have it


def batch_of(stage: Any) -> tuple[Any, Any] | None:
    """Returns size and `drop_remainder` of a `batch`, as tensors; `None` for other stages."""
    if not isinstance(stage, batch_op._BatchDataset | batch_op._ParallelBatchDataset):
        return None
    return stage._batch_size, stage._drop_remainder


def seeds_of(stage: Any) -> tuple[Any, Any] | None:
    """Returns the two seeds of a transformation that draws, as tensors; `None` for others."""
    own = vars(stage)
    return (own["_seed"], own["_seed2"]) if {"_seed", "_seed2"} <= own.keys() else None


def shuffle_buffer_of(stage: Any) -> Any:
    """Returns the size of the buffer of a `shuffle`, as a tensor; `None` for other stages."""
    is_shuffle = isinstance(stage, shuffle_op._ShuffleDataset)
    return stage._buffer_size if is_shuffle else None


def reshuffles(stage: Any) -> bool:
    """Tells whether a transformation that draws draws anew in each iteration."""
    again = vars(stage).get("_reshuffle_each_iteration")  # of `shuffle` alone
    return seeds_of(stage) is not None and again is not False


def serialized(stage: Any) -> bytes:
    """Returns the graph of a pipeline, for what its classes keep no note of."""
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    graph: bytes = stage._as_serialized_graph(external_state_policy=policy).numpy()
    return graph


def _dataset() -> Any:
    return tf.data.Dataset


ORDER = "to check that a pipeline has the same order on every rank"
NO_ORDER = "ranks might train on samples of others and leave some out"

CONTRACT = (
    Name(
        lambda: record,
        "could_possibly_record",
        "to give a collective a gradient only where it is asked for",
        "collectives would have no gradient, or be slower",
        (),
    ),
    Name(_dataset, "_inputs", ORDER, NO_ORDER, ()),
    Name(_dataset, "_functions", ORDER, NO_ORDER, ()),
    Name(_dataset, "_as_serialized_graph", ORDER, NO_ORDER),
    Name(lambda: interleave_op, "_ParallelInterleaveDataset", ORDER, NO_ORDER),
    Name(lambda: prefetch_op, "_PrefetchDataset", ORDER, NO_ORDER),
    Name(lambda: dataset_ops.UnaryDataset, "_input_dataset", ORDER, NO_ORDER, instance=True),
    *(
        Name(lambda: shuffle_op._ShuffleDataset, name, ORDER, NO_ORDER, instance=True)
        for name in ("_seed", "_seed2", "_buffer_size", "_reshuffle_each_iteration")
    ),
    *(
        Name(partial(getattr, batch_op, kind), name, ORDER, NO_ORDER, instance=True)
        for kind in ("_BatchDataset", "_ParallelBatchDataset")
        for name in ("_batch_size", "_drop_remainder")
    ),
    *(
        Name(owner, "_deterministic", ORDER, NO_ORDER, instance=True)
        for owner in (
            lambda: map_op._ParallelMapDataset,
            lambda: batch_op._ParallelBatchDataset,
            lambda: readers.ParallelInterleaveDataset,
        )
    ),
)
