"""`gather`: the rows of all ranks in the order of the data set."""

from typing import Any

import numpy as np

from keras_dist import errors, ops, runtime
from keras_dist.data import epochs
from keras_dist.data.nested import as_array
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
    known = None if data is None else _indices(data)
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
    """Returns the rows of all ranks, in an order.

    Collective: every rank; dtypes and all dimensions but the first must agree; blocks.

    Returns:
        New arrays. With `root_only`, `None` on the other ranks.
    """
    if not root_only:
        return [whole[order] for whole in ops.grouped_allgather(rows, process_set=process_set)]
    comm, found = runtime.communicator(process_set), []
    for leaf in rows:
        to_root = [len(leaf)] + [0] * (comm.size - 1)
        whole, _ = ops.alltoall(leaf, to_root, process_set=process_set)
        found.append(whole[order] if comm.rank == 0 else whole)
        del whole
    return found if comm.rank == 0 else None


def check_order(data: Any) -> None:
    """Checks that the rows of a shard can be put in the order of the data set."""
    _indices(data)


def _indices(data: Any) -> np.ndarray:
    """Returns the number of the sample of each row of this rank's shard."""
    found = epochs.of(data)
    if found is not None and found.samples is not None:
        return found.samples()
    raise errors.DataError(
        runtime.where(),
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
