"""`.npz` files: each file is a shard."""

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
    """Returns this rank's batches of arrays in `.npz` files, for `fit`.

    File i belongs to rank `i % size`. With fewer files than ranks, every rank reads all files, and
    row i belongs to rank `i % size`. A rank keeps four files in memory. Shuffling permutes the
    files each epoch, and the rows within each group of four consecutive files.

    Collective: every rank must call it with the same arguments. Blocks until each file has been
    inspected by one rank. An error on one rank is raised on all ranks.

    Args:
        files: a path, a pattern such as `"train/*.npz"`, or a list of them.
        x: name of an array, or nested tuples, lists and dicts of names. A batch has the same
            structure; arrays have shape `(batch, ...)`.
        y: the same for the labels. Defaults to none: a batch is `x` alone.
        batch_size: maximum number of samples per step on this rank. A rank with fewer samples
            than others distributes them over the same number of steps. Defaults to 32.
        shuffle: whether each epoch has a new order. Pass False to evaluate or predict.
            `"global"`: one order of all samples, independent of the number of ranks; every rank
            reads all files. Defaults to True.
        seed: integer that, with the rank and the epoch, determines the order. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: number of batches per epoch on each rank. Defaults to all.
        unreadable: policy for files that a rank cannot read when the data set is created:
            `"raise"` an error that names file and rank, or `"skip"` them on all ranks with a
            message on rank 0. Damage found later is an error. Defaults to `"raise"`.

    Returns:
        A `tf.data.Dataset` with the TensorFlow backend, otherwise a `keras.utils.PyDataset`.

    Raises:
        DataError: a file or an array is missing or unreadable, lengths or shapes differ, or there
            are too few rows.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument has the wrong type.
        MismatchError: files or arguments differ across ranks.

    Example:
    ```python
    train = keras_dist.data.npz("train/*.npz", x="images", y="labels", batch_size=64)
    model.fit(train, callbacks=keras_dist.callbacks())
    ```
    """

    def make_source() -> ShardSource:
        options = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        paths = expanded(files, options)
        names = named(x, y)
        facts = [*facts_of_files(paths), Fact("the names of the arrays", repr(names))]
        return ShardSource(NpzFiles(names, options), paths, options, unreadable, facts)

    return consistency.prepare(make_source)


class NpzFiles:
    """Files written by `numpy.savez`."""

    mixed = MIXED

    def __init__(self, names: Any, options: ShardOptions):
        self._names, self._options = names, options

    def look(self, path: str) -> Found:
        """Reads the headers of the arrays."""
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
            shapes = ", ".join(f"{name} {shape}" for name, (shape, _) in headers.items())
            remedy = "Write one entry per sample into each array."
            raise self._error(f"arrays of equal length in {path}", shapes, remedy)
        layout = tuple(
            (name, dtype.newbyteorder("=").str, shape[1:])
            for name, (shape, dtype) in headers.items()
        )
        return Found(lengths.pop(), layout, self._names)

    def reader(self, locations: Sequence[Location], found: Found) -> CachedShards:
        """Returns the reader of the files."""
        return CachedShards(self._load, locations, found, self.mixed)

    def _load(self, location: Location) -> dict[str, np.ndarray]:
        with np.load(location.path) as arrays:
            return {name: arrays[name] for name in names_in(self._names)}

    def _error(self, expected: str, received: str, remedy: str) -> errors.DataError:
        return errors.DataError(self._options.where, expected, received, remedy)


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
