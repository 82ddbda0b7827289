"""Private names of tf.data: how a pipeline was built. `contract.check("tf_data")` comes first."""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist._compat.contract import Owner
from keras_dist._compat.tensorflow import version as version

OPS = "tensorflow.python.data.ops"


def stages_of(dataset: Any) -> Iterator[Any]:
    """Yields the transformations of a pipeline, from the last to the sources."""
    yield dataset
    for source in dataset._inputs():
        yield from stages_of(source)


def graphs_of(stage: Any) -> Iterator[tf.Graph]:
    """Yields the graphs of the functions given to a transformation, and of those they call."""
    waiting = [function.function.graph for function in stage._functions()]
    seen = set()
    while waiting:
        graph = waiting.pop()
        yield graph
        for op in graph.get_operations():
            # In an order that all ranks have: that of the map differs from process to process.
            for _, attribute in sorted(op.node_def.attr.items()):
                for name in (each.name for each in (attribute.func, *attribute.list.func)):
                    called = graph._get_function(name) if name and name not in seen else None
                    seen.add(name)
                    waiting += [called.graph] if called is not None else []


def input_of(stage: Any) -> Any:
    """Returns the input of a transformation that has one input."""
    return stage._input_dataset


def is_prefetch(stage: Any) -> bool:
    """Returns whether a transformation is a `prefetch`."""
    return isinstance(stage, _ops("prefetch_op")._PrefetchDataset)


def is_filter(stage: Any) -> bool:
    """Returns whether a transformation is a `filter`."""
    return isinstance(stage, _ops("filter_op")._FilterDataset)


def is_interleave(stage: Any) -> bool:
    """Returns whether a transformation is an `interleave` in several threads."""
    return isinstance(stage, _ops("interleave_op")._ParallelInterleaveDataset)


def is_nondeterministic(stage: Any) -> bool:
    """Returns whether a parallel `map`, `batch` or reader was made with `deterministic=False`."""
    return vars(stage).get("_deterministic") == "false"  # only parallel stages have it


def batch_of(stage: Any) -> tuple[Any, Any] | None:
    """Returns size and `drop_remainder` of a `batch`, as tensors; `None` for other stages."""
    ops = _ops("batch_op")
    if not isinstance(stage, ops._BatchDataset | ops._ParallelBatchDataset):
        return None
    return stage._batch_size, stage._drop_remainder


def cache_file_of(stage: Any) -> str | None:
    """Returns the file of a `cache`; empty for one in memory, `None` for other stages."""
    if not isinstance(stage, _ops("cache_op").CacheDataset):
        return None
    return os.fsdecode(stage._filename.numpy())


def seeds_of(stage: Any) -> tuple[Any, Any] | None:
    """Returns the two seeds of a random transformation, as tensors; `None` for other stages."""
    attributes = vars(stage)
    if not {"_seed", "_seed2"} <= attributes.keys():
        return None
    return attributes["_seed"], attributes["_seed2"]


def shuffle_buffer_of(stage: Any) -> Any:
    """Returns the buffer size of a `shuffle`, as a tensor; `None` for other stages."""
    is_shuffle = isinstance(stage, _ops("shuffle_op")._ShuffleDataset)
    return stage._buffer_size if is_shuffle else None


def reshuffles(stage: Any) -> bool:
    """Returns whether a random transformation draws a new order in each iteration."""
    again = vars(stage).get("_reshuffle_each_iteration")  # only a `shuffle` has it
    return seeds_of(stage) is not None and again is not False


def serialized(stage: Any) -> bytes:
    """Returns the graph of a pipeline, which holds options that the classes do not keep."""
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    graph: bytes = stage._as_serialized_graph(external_state_policy=policy).numpy()
    return graph


def _ops(module: str) -> Any:
    return importlib.import_module(f"{OPS}.{module}")


DATASET = Owner("tensorflow:data.Dataset")
ORDER = "to check that a pipeline has the same order on every rank"
NO_ORDER = "ranks might repeat the samples of other ranks and omit some"

CONTRACT = (
    DATASET.method("_inputs()", ORDER, NO_ORDER),
    DATASET.method("_functions()", ORDER, NO_ORDER),
    DATASET.name("_as_serialized_graph", ORDER, NO_ORDER),
    Owner(f"{OPS}.cache_op:CacheDataset").attribute(
        "_filename",
        "to give each rank a cache file of its own",
        "ranks of a host would write the same file",
    ),
    Owner("tensorflow.python.framework.ops:Graph").method("_get_function(name)", ORDER, NO_ORDER),
    Owner("tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction").name(
        "graph", ORDER, NO_ORDER
    ),
    Owner(f"{OPS}.filter_op").name("_FilterDataset", ORDER, NO_ORDER),
    Owner(f"{OPS}.interleave_op").name("_ParallelInterleaveDataset", ORDER, NO_ORDER),
    Owner(f"{OPS}.prefetch_op").name("_PrefetchDataset", ORDER, NO_ORDER),
    *(
        Owner(f"{OPS}.{owner}").attribute(name, ORDER, NO_ORDER)
        for owner, names in {
            "dataset_ops:UnaryDataset": ("_input_dataset",),
            "shuffle_op:_ShuffleDataset": (
                "_seed",
                "_seed2",
                "_buffer_size",
                "_reshuffle_each_iteration",
            ),
            "batch_op:_BatchDataset": ("_batch_size", "_drop_remainder"),
            "batch_op:_ParallelBatchDataset": ("_batch_size", "_drop_remainder", "_deterministic"),
            "map_op:_ParallelMapDataset": ("_deterministic",),
            "readers:ParallelInterleaveDataset": ("_deterministic",),
        }.items()
        for name in names
    ),
)
