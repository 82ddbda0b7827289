"""`gather`, the rows of all ranks in the order of the data set, and batches for predictions."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_dist import errors, ops, runtime
from keras_dist.data import epochs
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.nested import as_array, is_a, is_tensor, is_tf_dataset, leaves
from keras_dist.runtime.process_sets import ProcessSet


def gather(
    values: Any,
    data: Any = None,
    *,
    root_only: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """Returns one row for each sample, in the order of the data set, from the rows of all ranks.

    `allgather` concatenates in rank order. `shard` gives sample `i` to rank `i % size`, so rows
    that belong to samples come back interleaved, and with `remainder="pad"` some come twice.
    `gather` puts each row in its place and drops repeated ones.

    Collective: every rank; structure, dtypes and all dimensions but the first must agree; blocks.

    Args:
        values: array, or nested lists, tuples and dicts of arrays, with one row for each sample of
            this rank, in the order of its shard: what `model.predict` returns for the shard.
        data: what `shard` returned for arrays, single samples or a `tf.data.Dataset` of samples,
            with `shuffle=False`. Defaults to `None`: sample `i` is on rank `i % size`, none is
            repeated, and none is missing.
        root_only: whether only rank 0 needs the result; the other ranks then hold their own rows
            only. Defaults to `False`.
        process_set: the ranks, if `data` is `None`. Defaults to all.

    Returns:
        New numpy arrays in the structure of `values`. With `root_only`, `None` on the other ranks.

    Raises:
        DataError: the order of `data` is unknown because it is shuffled or consists of batches, or
            the numbers of rows do not fit it; raised on every rank.
        MismatchError: the ranks have different arguments; raised on every rank.

    Example:
    ```python
    test = keras_dist.data.shard(x_test, batch_size=64, shuffle=False)
    outputs = keras_dist.gather(model.predict(test), test)  # one row for each row of x_test
    ```
    """
    from keras import tree

    comm = runtime.communicator(process_set)
    rows = [as_array(leaf) for leaf in tree.flatten(values)]
    known = None if data is None else indices_of(data)
    counts = [len(leaf) if leaf.ndim else -1 for leaf in rows]
    expected = counts[:1] if known is None else [len(known)]
    fits = rows and set(counts) == set(expected)
    problem = None if fits else f"{counts} rows for {expected} samples"
    reports = ops.allgather_object((problem, counts[:1]), process_set=process_set)
    for rank, (text, _) in enumerate(reports):
        if text is not None:
            _fail(rank, len(reports), text)
    indices = comm.rank + comm.size * np.arange(counts[0]) if known is None else known
    held = np.concatenate(ops.allgather_object(indices, process_set=process_set))
    unique, first = np.unique(held, return_index=True)
    if known is None and len(unique) and unique[-1] != len(unique) - 1:
        lengths = [count for _, [count] in reports]
        _fail(comm.rank, comm.size, f"{lengths} rows on the ranks")
    whole = in_order(rows, first, root_only, process_set)
    return None if whole is None else tree.pack_sequence_as(values, whole)


def in_order(
    rows: list[np.ndarray], order: np.ndarray, root_only: bool, process_set: ProcessSet | None
) -> list[np.ndarray] | None:
    """Returns the rows of all ranks in an order: new arrays. Collective; `root_only`: on rank 0."""
    is_text = [leaf.dtype.kind in "OSU" for leaf in rows]
    if not root_only and not any(is_text):
        return [whole[order] for whole in ops.grouped_allgather(rows, process_set=process_set)]
    comm, found = runtime.communicator(process_set), []
    for leaf, text in zip(rows, is_text, strict=True):
        if text or not root_only:
            gather = ops.allgather_object if text else ops.allgather
            whole = gather(leaf, process_set=process_set)
            found.append((np.concatenate(whole) if text else whole)[order])
            continue
        to_root = [len(leaf)] + [0] * (comm.size - 1)
        whole, _ = ops.alltoall(leaf, to_root, process_set=process_set)
        found.append(whole[order] if comm.rank == 0 else whole)
        del whole
    return found if comm.rank == 0 or not root_only else None


def indices_of(data: Any) -> np.ndarray:
    """Returns the number of the sample of each row of this rank's shard; raises if it has none."""
    found = epochs.of(data)
    if found is not None and found.samples is not None:
        return found.samples()
    raise errors.DataError(
        "data that shard() made of samples, with shuffle=False",
        "data that is shuffled, or whose elements are batches or files"
        if epochs.is_sharded(data)
        else f"an object of type {type(data).__name__}",
        "Pass the whole data set to keras_dist.predict, or shard it with shuffle=False.",
    )


def _fail(rank: int, size: int, received: str) -> None:
    raise errors.DataError(
        f"[rank {rank} of {size}]",
        "one row for each sample of the shard of every rank",
        received,
        "Pass the outputs for all samples of the shard, and the shard itself as data.",
    )


# --- Predictions


class Turns(NamedTuple):
    """The batches of a rank: batch i of a whole data set belongs to rank `i % size`.

    `shard` gives all ranks equal numbers of steps. Predictions need no steps in common, but each
    sample once.
    """

    batches: Iterator[Any]
    total: int | None


def in_turn(data: Any, batch_size: int | None, steps: int | None, rank: int, size: int) -> Turns:
    """Returns the batches of one rank, from data as `model.predict` takes it."""
    if isinstance(data, tuple | list | dict) or is_tensor(data):
        return _of_arrays(data, batch_size or DEFAULT_BATCH_SIZE, steps, rank, size)
    if batch_size is not None:
        _refuse(errors.ArgumentError, "no batch_size for data of batches", str(batch_size))
    if is_tf_dataset(data):
        from keras_dist.data import tf_order

        if (reason := tf_order.unordered(data)) is not None and size > 1:
            _refuse(errors.DataError, "a tf.data.Dataset with the same order on all ranks", reason)
        data = data if steps is None else data.take(steps)
        mine = data.shard(size, rank)
        count = int(mine.cardinality())
        return Turns(map(_inputs, mine), count if count >= 0 else None)
    if is_a(data, "torch", "DataLoader"):
        from keras_dist.data.torch_loader import every_nth_batch

        data = every_nth_batch(data, rank, size, steps)
        return Turns(map(_inputs, data), len(data))
    if is_a(data, "keras", "PyDataset") and data.num_batches is not None:
        mine = range(rank, min(data.num_batches, steps or data.num_batches), size)
        return Turns((_inputs(data[index]) for index in mine), len(mine))
    return Turns(map(_inputs, itertools.islice(data, rank, steps, size)), None)


def _of_arrays(data: Any, batch_size: int, steps: int | None, rank: int, size: int) -> Turns:
    from keras import tree

    arrays = tree.map_structure(as_array, data)
    total = len(next(leaves(arrays))[1])
    batches = -(-total // batch_size)
    mine = range(rank, min(batches, steps or batches), size)

    def batch(index: int) -> Any:
        rows = slice(index * batch_size, (index + 1) * batch_size)
        return tree.map_structure(lambda array: array[rows], arrays)

    return Turns(map(batch, mine), len(mine))


def _inputs(batch: Any) -> Any:
    import keras

    inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
    if keras.config.backend() == "tensorflow":
        return inputs
    return keras.tree.map_structure(as_array, inputs)


def _refuse(kind: type[errors.KerasDistError], expected: str, received: str) -> None:
    remedy = "Pass data that is the same on every rank, in one order, as to model.predict."
    raise kind(expected, received, remedy)
