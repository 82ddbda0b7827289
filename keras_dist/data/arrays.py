"""Data with random access: nested arrays of numpy, pandas or a framework, and objects `data[i]`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data.indexed import (
    DEFAULT_BATCH_SIZE,
    SEEDED,
    WHOLE,
    IndexedSource,
    for_keras,
)
from keras_dist.data.nested import (
    SomeRows,
    as_array,
    concatenated,
    described,
    in_floatx,
    is_a,
    is_tensor,
    leaves,
    mapped,
    stacked,
)
from keras_dist.data.shard_options import Fact, ShardOptions


class ArraySource(IndexedSource):
    """Arrays in memory; every rank holds the full data set."""

    def __init__(self, data: Any, options: ShardOptions):
        no_reader("arrays", options)
        if options.batched:
            remedy = "Rows of arrays are single samples; omit the argument."
            options.refuse("arrays", {"batched": remedy})
        while isinstance(data, tuple) and len(data) > 1 and data[-1] is None:
            data = data[:-1]
        for path, leaf in leaves(data):
            _check(path, leaf)
        arrays = mapped(as_array, data)
        total = _common_length(list(leaves(arrays)))
        facts = [
            Fact("the kind of data", "arrays", WHOLE),
            Fact("the arrays", described(arrays), WHOLE),
        ]

        def take(indices: Any) -> Any:
            # Not the whole arrays: they may be maps of files.
            return mapped(lambda array: in_floatx(np.asarray(array[indices])), arrays)

        super().__init__(total, take(slice(0)), take, facts, options)
        if not options.draws:
            self.facts.append(Fact("some of its rows", SomeRows(arrays, total), SEEDED))


def no_reader(data: str, options: ShardOptions) -> None:
    """Refuses the arguments that do not apply to data with random access."""
    options.refuse(
        data,
        {
            "reader": "A reader applies to a list of files only.",
            "shuffle_buffer": "Data with random access is always shuffled completely; omit it.",
        },
    )


def _check(path: str, leaf: Any) -> None:
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(
        leaf
    ):  # numpy.asarray would drop the mask
        raise errors.DataError(
            f"{path} to have no masked values", f"{np.ma.count_masked(leaf)}", "Use its filled()."
        )
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
    raise errors.ArgumentTypeError(expected, received, remedy)


def _common_length(arrays: list[tuple[str, Any]]) -> int:
    lengths = {path: len(array) if array.ndim else None for path, array in arrays}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        text = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise errors.DataError(
            "arrays with one entry per sample, all of the same length",
            text.replace("None", "a scalar") or "no array and no file",
            "Cut them to the same first dimension.",
        )
    return next(iter(lengths.values())) or 0


# --- Objects with a length, whose `data[i]` is a sample, or a batch


class SampleSource(IndexedSource):
    """Nested arrays, or an object whose `data[i]` is sample i, or batch i if `batched`."""

    def __init__(self, data: Any, options: ShardOptions):
        self._settings = data if is_a(data, "keras", "PyDataset") else None
        kind = "data of single samples" if self._settings is None else "a PyDataset"
        no_reader(kind, options)
        is_batched = self._settings is not None or bool(options.batched)
        if is_batched:
            kind = "data whose elements are batches" if self._settings is None else kind
            remedy = "The data set makes the batches; set the batch size there."
            options.refuse(kind, {"global_batch_size": remedy, "batch_size": remedy})
        if self._settings is not None and options.batched is False:
            raise errors.ArgumentError(
                "no batched=False for a PyDataset",
                "batched=False",
                "Its elements are batches; omit the argument.",
            )
        join: Any = concatenated if is_batched else stacked
        of, batch_size = ("batches", 1) if is_batched else ("samples", DEFAULT_BATCH_SIZE)
        total = length_of(data)
        if total == 0:
            options.need_samples(0, of)
        first = data[0]
        if first is None:
            raise _filtered(data)
        first = mapped(as_array, join([first]))
        facts = [
            Fact("the kind of data", type(data).__name__, WHOLE),
            Fact("what its elements are", described(first), WHOLE),
        ]

        def take(indices: np.ndarray) -> Any:
            elements = [data[int(index)] for index in indices]
            if any(element is None for element in elements):
                raise _filtered(data)
            return join(elements)

        # Shapes may differ from batch to batch, as with padded text.
        example = None if is_batched else first
        super().__init__(total, example, take, facts, options, batch_size, of)

    def part(self, held: Sequence[int | None]) -> Any:
        return for_keras(self.batches, settings=self._settings)


def _filtered(data: Any) -> errors.DataError:
    """Returns the error of elements that are `None`, as a filter of grain leaves them."""
    return errors.DataError(
        "an element for each index below the length of the data",
        f"None, from a {type(data).__name__}",
        "If it filters its elements, pass an iterable that leaves them out, as to_iter_dataset() "
        "of grain, or filter before.",
    )


def length_of(data: Any) -> int:
    """Returns the number of elements of a data set; raises if it has none."""
    try:
        total = getattr(data, "num_batches", None) if not hasattr(data, "__len__") else len(data)
        cause = None
    except (TypeError, NotImplementedError) as error:
        total, cause = None, error
    # Infinite data has no length, or the largest integer.
    if total is None or total >= np.iinfo(np.int64).max:
        raise errors.DataError(
            "data with an end",
            f"a {type(data).__name__} without one",
            "Give it a length, or pass a function that returns a generator, and steps; of a sparse "
            "matrix, pass toarray().",
        ) from cause
    return int(total)
