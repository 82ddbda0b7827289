"""Batches of a whole data set in turn: batch i belongs to rank `i % size`, however many there are.

`shard` gives all ranks equal numbers of steps. Predictions need no steps in common, but each sample
once.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_dist import errors, runtime
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.kinds import is_a, is_tensor, is_tf_dataset
from keras_dist.data.nested import as_array, leaves


class Turns(NamedTuple):
    """The batches of a rank."""

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
        return Turns(map(_inputs, mine), _known(int(mine.cardinality())))
    if is_a(data, "torch", "DataLoader"):
        from keras_dist.data.torch_loader import every_nth_batch

        data = every_nth_batch(data, rank, size, steps)
        return Turns(map(_inputs, data), len(data))
    if is_a(data, "keras", "PyDataset") and data.num_batches is not None:
        mine = range(rank, min(data.num_batches, steps or data.num_batches), size)
        return Turns((_inputs(data[index]) for index in mine), len(mine))
    elements = iter(data() if callable(data) and not hasattr(data, "__iter__") else data)
    return Turns(map(_inputs, itertools.islice(elements, rank, steps, size)), None)


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


def _known(cardinality: int) -> int | None:
    return cardinality if cardinality >= 0 else None


def _refuse(kind: type[errors.KerasDistError], expected: str, received: str) -> None:
    remedy = "Pass data that is the same on every rank, in one order, as to model.predict."
    raise kind(errors.explain(runtime.where(), expected, received, remedy))
