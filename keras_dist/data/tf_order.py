"""What the transformations of a tf.data pipeline tell: its order, and the files that it caches in.

Each rank reads the whole pipeline and keeps every n-th element. If the orders of ranks or runs
differed, some samples would be used twice and others never, without an error. Data is never
examined: randomness inside Python functions is not detected. Every rank also writes the whole of
each `Dataset.cache(path)`, so ranks of one host must not share its files. TensorFlow cannot change
the path of a cache that later transformations read, only make another one.
"""

import collections
import dataclasses
import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_dist import errors
from keras_dist._compat import contract
from keras_dist._compat import tf_data as private
from keras_dist.data.shard_options import ShardOptions

# Names in functions and serialised pipelines; the classes of pipelines have other names.
RANDOM_OPS = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")
INDEX_OP = "RandomIndexShuffle"  # of `tf.random.experimental.index_shuffle`
UNSEEDED = (0, 0)
# The state is in the kernel; with a seed each iteration draws the same numbers.
STATEFUL_OPS = ("RandomStandardNormal", "RandomUniform", "RandomShuffle", "TruncatedNormal")
NO_SEED = 87654321  # TensorFlow's default for the global seed

MADE = "a name that the function"  # followed by a digest, in place of a file

#: the host of a rank, and the files that its pipeline caches in
HeldFiles = tuple[str, list[str]]


def unordered(dataset: tf.data.Dataset) -> str | None:
    """Returns the reason why the order may differ between runs, in words, or `None`."""
    if UNSEEDED in seeds(dataset):
        return "one that was shuffled without a seed"
    for stage in stages(dataset):
        operations = list(function_ops(stage))
        racing = private.is_nondeterministic(stage) or (
            private.is_interleave(stage) and _interleaves_by_speed(stage)
        )
        if racing or any(_is_nondeterministic(op.node_def) for op in operations):
            return "one with deterministic=False in map() or interleave()"
        chooses = private.is_filter(stage) or any(map(_shuffles_by_unknown_seed, operations))
        if chooses and any(map(_draws, operations)):
            return "one whose elements are chosen by random numbers without a seed"
    return None


def not_restored(dataset: tf.data.Dataset) -> str | None:
    """Returns the reason why a resumed run has another order, in words, or `None`."""
    if (what := unordered(dataset)) is not None:
        return what
    for stage in stages(dataset):
        operations = list(function_ops(stage))
        if private.reshuffles(stage) or any(op.type.startswith(RANDOM_OPS) for op in operations):
            return "one that is reshuffled in each epoch"
        if any(_draws(op) for op in operations):
            return "one with random numbers without a seed"
    return None


def is_seeded() -> bool:
    """Returns whether the global seed of TensorFlow is set, as by `keras.utils.set_random_seed`."""
    return global_seed() != NO_SEED


def global_seed() -> int:
    """Returns the global seed of TensorFlow, or `NO_SEED`."""
    return tf.compat.v1.get_seed(1)[0]


def seeds(dataset: tf.data.Dataset) -> list[tuple[int | None, int | None]]:
    """Returns the two seeds of every shuffle of the pipeline; 0 if not set."""
    found = []
    for stage in stages(dataset):
        if (own := private.seeds_of(stage)) is not None:
            found.append((_value(own[0]), _value(own[1])))
        for op in function_ops(stage):
            if op.type.startswith(RANDOM_OPS):
                names = [argument.name for argument in op.op_def.input_arg]
                inputs = dict(zip(names, op.inputs, strict=False))
                found.append((_value(inputs["seed"]), _value(inputs["seed2"])))
    return found


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """The parts of a pipeline that ends in `shuffle`, or in `shuffle` and `batch`."""

    source: tf.data.Dataset
    buffer: int
    batch_size: int | None
    drops: bool


def shuffled_last(dataset: tf.data.Dataset) -> Shuffled | None:
    """Returns the parts of a pipeline that ends in a reshuffling `shuffle`, and maybe a `batch`."""
    contract.check("tf_data")
    batch_size, drops = None, False
    stage = _before_prefetch(dataset)
    if (batch := private.batch_of(stage)) is not None:
        batch_size, drops = _value(batch[0]), bool(_value(batch[1]))
        stage = _before_prefetch(private.input_of(stage))
    buffer = _value(private.shuffle_buffer_of(stage))
    if buffer is None or not private.reshuffles(stage):
        return None
    return Shuffled(private.input_of(stage), buffer, batch_size, drops)


def _before_prefetch(stage: Any) -> Any:
    return _before_prefetch(private.input_of(stage)) if private.is_prefetch(stage) else stage


def stages(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the transformations of a pipeline, from the last to the sources."""
    contract.check("tf_data")
    yield from private.stages_of(dataset)


def function_ops(stage: Any) -> Iterator[Any]:
    """Yields the operations of the functions of a transformation, and of those they call."""
    for graph in private.graphs_of(stage):
        yield from graph.get_operations()


def _draws(op: Any) -> bool:
    attributes = op.node_def.attr
    return op.type.startswith(STATEFUL_OPS) and not attributes["seed"].i | attributes["seed2"].i


def _shuffles_by_unknown_seed(op: Any) -> bool:
    return op.type == INDEX_OP and not _is_constant(op.inputs[1])


def _is_constant(tensor: Any) -> bool:
    op = tensor.op
    is_given = op.type == "Placeholder" or op.op_def.is_stateful
    return not is_given and all(map(_is_constant, op.inputs))


def _is_nondeterministic(node: Any) -> bool:
    return "Dataset" in node.op and node.attr["deterministic"].s == b"false"


def _interleaves_by_speed(stage: Any) -> bool:
    graph = tf.compat.v1.GraphDef.FromString(private.serialized(stage))
    return any(map(_is_nondeterministic, graph.node))


def _value(seed: Any) -> int | None:
    operation = getattr(seed, "op", None)
    if operation is not None and operation.type == "SelectV2":
        seed = operation.inputs[2]  # tf.data replaces (0, 0) with a conditional
    value = tf.get_static_value(seed) if seed is not None else None
    return None if value is None else int(value)


# --- Caches in files


def held_files(dataset: tf.data.Dataset, complete: bool = False) -> HeldFiles:
    """Returns the files that a pipeline caches in."""
    files = []
    for stage in stages(dataset):
        files.append(private.cache_file_of(stage))
        for op in function_ops(stage):
            if op.type.startswith("CacheDataset"):
                name = tf.get_static_value(op.inputs[1])
                files.append(_described(op.graph) if name is None else os.fsdecode(name.item()))
    written = [f for f in files if f and (complete or not os.path.exists(f"{f}.index"))]
    return socket.gethostname(), written


def _shared(held: Sequence[HeldFiles]) -> set[str]:
    """Returns the files that several ranks of a host hold, given those of all ranks."""
    places = collections.Counter((host, file) for host, files in held for file in set(files))
    return {file for (_, file), ranks in places.items() if ranks > 1}


def check_written(held: Sequence[HeldFiles]) -> None:
    """Checks the files of the data sets of all ranks of a `fit` or `evaluate`."""
    # Names that functions make are not examined: the data of a rank may decide on them.
    shared = sorted(file for file in _shared(held) if not file.startswith(MADE))
    if shared:
        raise errors.DataError(
            "each rank of a host to cache its data in a file of its own",
            f".cache({shared[0]!r}) on several ranks, in the data of fit or evaluate",
            "Put the rank into the name, as in cache(f'rows-{keras_dist.rank()}'); or call "
            ".cache() right before keras_dist.data.shard, which then adds the rank itself.",
        )


def with_own_cache(dataset: tf.data.Dataset, options: ShardOptions) -> tf.data.Dataset:
    """Returns a pipeline of this rank's files; a cache at its end is a file of this rank."""
    file = private.cache_file_of(dataset)
    if not file or options.size == 1:
        return dataset
    inner = with_own_cache(private.input_of(dataset), options)
    return inner.cache(f"{file}.rank{options.rank}of{options.size}")


def with_own_caches(
    dataset: tf.data.Dataset, held: Sequence[HeldFiles], options: ShardOptions
) -> tf.data.Dataset:
    """Returns a pipeline whose caches are files that no other rank of the host writes."""
    shared = _shared(held)
    if private.cache_file_of(dataset) in shared:
        own = f"{private.cache_file_of(dataset)}.rank{options.rank}"
        return with_own_caches(private.input_of(dataset), held, options).cache(own)
    found = [file for file in held_files(dataset, complete=True)[1] if file in shared]
    if not found:
        return dataset
    raise errors.DataError(
        "each rank of a host to cache its pipeline in a file of its own",
        f".cache({found[0]!r}) on several ranks, before other transformations",
        "Put the rank into the name, as in cache(f'rows-{keras_dist.rank()}'); or make "
        ".cache() the last transformation before shard or predict, which then add the rank.",
    )


def _described(graph: tf.Graph) -> str:
    """Returns a text for a file whose name a function makes; equal if the functions are."""
    digest = hashlib.sha256(graph.as_graph_def().SerializeToString(deterministic=True))
    return f"{MADE} {digest.hexdigest()[:8]} makes"
