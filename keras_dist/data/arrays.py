"""Arrays of numpy, pandas or a framework, alone or nested: sample i belongs to rank i % size."""

from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data.indexed import WHOLE, IndexedSource
from keras_dist.data.kinds import is_tensor
from keras_dist.data.nested import as_array, described, leaves, mapped
from keras_dist.data.shard_options import Fact, ShardOptions


class ArraySource(IndexedSource):
    """Arrays in memory; every rank holds the full data set."""

    def __init__(self, data: Any, options: ShardOptions):
        no_reader("arrays", options)
        if options.batched:
            remedy = "Rows of arrays are single samples; omit the argument."
            options.refuse("arrays", {"batched": remedy})
        super().__init__(ArrayRows(data, options), options)


class ArrayRows:
    """The samples of arrays."""

    def __init__(self, data: Any, options: ShardOptions):
        while isinstance(data, tuple) and len(data) > 1 and data[-1] is None:
            data = data[:-1]
        for path, leaf in leaves(data):
            _check(path, leaf, options)
        self.example = mapped(as_array, data)
        self.total = _common_length(list(leaves(self.example)), options)
        self.facts = [
            Fact("the kind of data", "arrays", WHOLE),
            Fact("the arrays", described(self.example), WHOLE),
        ]

    def take(self, indices: np.ndarray) -> Any:
        """Returns a copy of the rows with these indices."""
        return mapped(lambda array: np.asarray(array[indices]), self.example)


def no_reader(data: str, options: ShardOptions) -> None:
    """Refuses the arguments that do not apply to data with random access."""
    options.refuse(
        data,
        {
            "reader": "A reader applies to a list of files only.",
            "shuffle_buffer": "Data with random access is always shuffled completely; omit it.",
        },
    )


def _check(path: str, leaf: Any, options: ShardOptions) -> None:
    expected, received = f"{path} to be a numpy array", f"an object of type {type(leaf).__name__}"
    if not is_tensor(leaf):
        remedy = "Convert it with numpy.asarray, or give shard() a tf.data.Dataset."
    elif np.ndim(leaf) == 2 and getattr(leaf, "dtypes", None) is not None:
        if as_array(leaf).dtype != object:
            return
        expected, received = f"{path} to have columns of one numeric type", "columns of objects"
        remedy = "Convert the columns, or pass dict(frame) for one array per column."
    else:
        return
    raise errors.ArgumentTypeError(options.where, expected, received, remedy)


def _common_length(arrays: list[tuple[str, Any]], options: ShardOptions) -> int:
    lengths = {path: len(array) if array.ndim else None for path, array in arrays}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        text = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise errors.DataError(
            options.where,
            "arrays with one entry per sample, all of the same length",
            text.replace("None", "a scalar") or "no array and no file",
            "Cut them to the same first dimension.",
        )
    return next(iter(lengths.values())) or 0
