"""`.npz` files; a file is a piece."""

import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data import consistency
from keras_dist.data.cached_shards import MIXED, CachedShards, named, names_in
from keras_dist.data.file_index import Found, Unreadable
from keras_dist.data.files import facts_of_files
from keras_dist.data.order import Shuffle
from keras_dist.data.partition import Remainder
from keras_dist.data.paths import Paths, expanded
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.shard_source import Location, ShardSource

__all__ = ["NpzFiles", "npz"]


def npz(
    files: Paths,
    x: Any,
    y: Any = None,
    batch_size: int = 32,
    *,
    shuffle: Shuffle = True,
    seed: int = 0,
    remainder: Remainder = "uneven",
    steps: int | None = None,
    unreadable: Unreadable = "raise",
) -> Any:
    """Generates the batches of this rank from arrays in `.npz` files, for `fit`.

    File i belongs to rank `i % size`. With fewer files than ranks every rank reads all files, and
    row i belongs to rank `i % size`. A rank keeps four files in memory: in every epoch the order of
    the files is shuffled, then the rows of each four consecutive files.

    Collective: every rank, with the same arguments; blocks until one rank has inspected each file.
    An error on one rank is raised on all.

    Args:
        files: a path, a pattern such as `"train/*.npz"`, or a list of them.
        x: name of an array, or nested tuples, lists and dicts of names; a batch has the same
            structure.
        y: the same for the labels. Defaults to `None`: a batch is `x` alone.
        batch_size: largest number of samples of this rank in a step: ranks with fewer samples than
            others distribute them over the same number of steps. Defaults to 32.
        shuffle: whether to shuffle in every epoch. Pass `False` to evaluate or predict.
            `"global"`: one order of all data, which does not depend on the number of ranks; every
            rank reads all files. Defaults to `True`.
        seed: integer seed of the orders, combined with the rank and the epoch. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: number of batches in an epoch of each rank, to end it early. Defaults to all.
        unreadable: what to do with files that a rank cannot read when the data set is made:
            `"raise"` an error that names file and rank, or `"skip"` them on all ranks; rank 0
            logs them. Damage that is found when rows are read is an error. Defaults to
            `"raise"`.

    Returns:
        `tf.data.Dataset` on the TensorFlow backend, `keras.utils.PyDataset` on others.

    Raises:
        DataError: a file or an array is missing or unreadable, lengths or shapes differ, or there
            are too few rows.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument is of the wrong type.
        MismatchError: the ranks have different files or arguments.

    Example:
    ```python
    train = keras_dist.data.npz("train/*.npz", x="images", y="labels", batch_size=64)
    model.fit(train, callbacks=keras_dist.callbacks())
    ```
    """

    def survey() -> ShardSource:
        terms = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        paths = expanded(files, terms)
        names = named(x, y)
        facts = [*facts_of_files(paths), Fact("the names of the arrays", repr(names))]
        return ShardSource(NpzFiles(names, terms), paths, terms, unreadable, facts)

    return consistency.prepare(survey)


class NpzFiles:
    """Files of arrays written by numpy.

    Args:
        names: names of arrays in the structure of a batch.
        terms: for messages.
    """

    mixed = MIXED

    def __init__(self, names: Any, terms: ShardOptions):
        self._names, self._terms = names, terms

    def look(self, path: str) -> Found:
        """Reads the headers of the arrays in a file."""
        headers = {}
        with zipfile.ZipFile(path) as archive:
            for name in names_in(self._names):
                if f"{name}.npy" not in archive.namelist():
                    known = ", ".join(n.removesuffix(".npy") for n in archive.namelist())
                    raise self._error(f"an array {name!r} in {path}", known, "Pass one of these.")
                with archive.open(f"{name}.npy") as file:
                    headers[name] = _header(file)
        lengths = {shape[:1] for shape, _ in headers.values()}
        if len(lengths) != 1 or () in lengths:
            received = ", ".join(f"{name} {shape}" for name, (shape, _) in headers.items())
            remedy = "Write one entry per sample into each array."
            raise self._error(f"arrays of equal length in {path}", received, remedy)
        layout = tuple((name, dtype.str, shape[1:]) for name, (shape, dtype) in headers.items())
        return Found(lengths.pop(), layout, self._names)

    def reader(self, places: Sequence[Location], found: Found) -> CachedShards:
        """Returns a reader of the files."""
        return CachedShards(self._load, places, found, self.mixed)

    def _load(self, place: Location) -> dict[str, np.ndarray]:
        with np.load(place.path) as arrays:
            return {name: arrays[name] for name in names_in(self._names)}

    def _error(self, expected: str, received: str, remedy: str) -> errors.DataError:
        return errors.DataError(self._terms.explain(expected, received, remedy))


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = read[version](file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    return shape, dtype
