"""Files of `Dataset.cache(path)` that ranks of one host would write at the same time.

Every rank reads the whole pipeline and so writes the whole cache. TensorFlow cannot change the path
of a cache that later transformations read, only make another one.
"""

import collections
import hashlib
import os
import socket
from collections.abc import Sequence

import tensorflow as tf

from keras_dist import errors, runtime
from keras_dist._compat import tf_data as private
from keras_dist.data import tf_order
from keras_dist.data.shard_options import ShardOptions

MADE = "a name that the function"  # followed by a digest, in place of a file

#: the host of a rank, and the files that its pipeline caches in
HeldFiles = tuple[str, list[str]]


def held_files(dataset: tf.data.Dataset, complete: bool = False) -> HeldFiles:
    """Returns the files that a pipeline caches in."""
    files = []
    for stage in tf_order.stages(dataset):
        files.append(private.cache_file_of(stage))
        for op in tf_order.function_ops(stage):
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
    """Checks the files of the data sets of all ranks of a `fit`.

    Names that functions make are not examined: the data of a rank may decide on them.
    """
    shared = sorted(file for file in _shared(held) if not file.startswith(MADE))
    if shared:
        raise errors.DataError(
            runtime.where(),
            "each rank of a host to cache its data in a file of its own",
            f".cache({shared[0]!r}) on several ranks, in the data of fit",
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
        options.where,
        "each rank of a host to cache its pipeline in a file of its own",
        f".cache({found[0]!r}) on several ranks, before other transformations",
        "Put the rank into the name, as in cache(f'rows-{keras_dist.rank()}'); or make "
        ".cache() the last transformation before shard(), which then adds the rank itself.",
    )


def _described(graph: tf.Graph) -> str:
    """Returns a text for a file whose name a function makes; equal if the functions are."""
    digest = hashlib.sha256(graph.as_graph_def().SerializeToString(deterministic=True))
    return f"{MADE} {digest.hexdigest()[:8]} makes"
