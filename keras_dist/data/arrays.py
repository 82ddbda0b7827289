"""Arrays of numpy, pandas or a framework: sample i belongs to rank `i % size`."""

from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data.indexed import WHOLE, IndexedSource
from keras_dist.data.kinds import is_tensor
from keras_dist.data.nested import as_array, described, leaves, mapped
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = ["ArrayRows", "ArraySource", "no_reader"]


class ArraySource(IndexedSource):
    """Arrays in memory, complete on every rank.

    Args:
        data: array, or nested tuples, lists and dicts of arrays of equal length.
        terms: options of `shard`.

    Raises:
        ArgumentTypeError: a leaf of `data` is not an array.
        DataError: lengths differ, or there are fewer samples than ranks or steps.
    """

    def __init__(self, data: Any, terms: ShardOptions):
        no_reader("arrays", terms)
        if terms.batched:
            terms.refuse("arrays", {"batched": "Rows of arrays are samples; leave it out."})
        super().__init__(ArrayRows(data, terms), terms)


class ArrayRows:
    """The samples of arrays.

    Args:
        data: array, or nested tuples, lists and dicts of arrays of equal length; a `None` at the
            end of a tuple is dropped, as in `(x, y, None)`.
        terms: options of `shard`, for messages.
    """

    def __init__(self, data: Any, terms: ShardOptions):
        while isinstance(data, tuple) and len(data) > 1 and data[-1] is None:
            data = data[:-1]
        for path, leaf in leaves(data):
            _check(path, leaf, terms)
        self.example = mapped(as_array, data)
        found = list(leaves(self.example))
        self.total = _common_length(found, terms)
        self.facts = [
            Fact("the kind of data", "arrays", WHOLE),
            Fact("the arrays", described(self.example), WHOLE),
        ]

    def take(self, indices: np.ndarray) -> Any:
        """Returns new arrays of the rows with these indices."""
        return mapped(lambda array: np.asarray(array[indices]), self.example)


def no_reader(data: str, terms: ShardOptions) -> None:
    """Refuses arguments that are not defined for data with indices."""
    terms.refuse(
        data,
        {
            "reader": "Only a list of files takes a reader.",
            "shuffle_buffer": "The data is always shuffled completely; leave it out.",
        },
    )


def _check(path: str, leaf: Any, terms: ShardOptions) -> None:
    expected, kind = f"{path} to be a numpy array", f"an object of type {type(leaf).__name__}"
    if not is_tensor(leaf):
        remedy = "Convert it with numpy.asarray, or give shard() a tf.data.Dataset."
    elif np.ndim(leaf) == 2 and getattr(leaf, "dtypes", None) is not None:
        mixed = as_array(leaf).dtype == object
        if not mixed:
            return
        expected, kind = f"{path} to have one dtype of numbers in all columns", "columns of objects"
        remedy = "Convert the columns, or pass dict(frame), one array for each column."
    else:
        return
    raise errors.ArgumentTypeError(terms.explain(expected, kind, remedy))


def _common_length(found: list[tuple[str, Any]], terms: ShardOptions) -> int:
    lengths = {path: len(array) if array.ndim else None for path, array in found}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        text = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise errors.DataError(
            terms.explain(
                "arrays with one entry per sample, all of the same length",
                text.replace("None", "a scalar") or "no array and no file",
                "Cut them to the same first dimension.",
            )
        )
    return next(iter(lengths.values())) or 0
