"""Arrays in `.npz` and Parquet files: each file, or row group, is a shard that is loaded whole."""

import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data import consistency
from keras_dist.data.files import Found, Paths, Unreadable, expanded, facts_of_files
from keras_dist.data.nested import leaves
from keras_dist.data.partition import Remainder, Shuffle
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.shard_source import CachedShards, Location, Read, ShardSource

MATRIX = "\t"  # ends each name of a column in the name of a matrix of columns


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
        paths = expanded(files)
        names = x if y is None else (x, y)
        facts = [*facts_of_files(paths), Fact("the names of the arrays", repr(names))]
        return ShardSource(NpzFiles(names), paths, options, unreadable, facts)

    return consistency.prepare(make_source)


def parquet(
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
    """Returns this rank's batches of columns in Parquet files, for `fit`.

    Row groups are numbered across all files: row group i belongs to rank `i % size`. With fewer
    row groups than ranks, row i belongs to rank `i % size`. A rank keeps four row groups in
    memory. Shuffling permutes the row groups each epoch, and the rows within each group of four
    consecutive row groups. Requires pyarrow: `pip install 'keras_dist[parquet]'`.

    Collective: every rank must call it with the same arguments. Blocks until each file has been
    inspected by one rank. An error on one rank is raised on all ranks.

    Args:
        files: a path, a pattern such as `"train/*.parquet"`, or a list of them.
        x: name of a column of numbers, shape `(batch,)`, or of lists of n numbers, shape
            `(batch, n)`; or a list of names of number columns, one array of shape
            `(batch, columns)`; or nested tuples and dicts of these: a batch has the same structure.
        y: the same for the labels. Defaults to none: a batch is `x` alone.
        batch_size: maximum number of samples per step on this rank. A rank with fewer samples
            than others distributes them over the same number of steps. Defaults to 32.
        shuffle: whether each epoch has a new order. Pass False to evaluate or predict.
            `"global"`: one order of all samples, independent of the number of ranks; every rank
            reads all row groups. Defaults to True.
        seed: integer that, with the rank and the epoch, determines the order. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: number of batches per epoch on each rank. Defaults to all.
        unreadable: `"raise"` or `"skip"`, see `npz`. Defaults to `"raise"`.

    Returns:
        A `tf.data.Dataset` with the TensorFlow backend, otherwise a `keras.utils.PyDataset`.

    Raises:
        DataError: a file or a column is missing, unreadable or not numeric, layouts of files
            differ, or there are too few rows.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument has the wrong type.
        MismatchError: files or arguments differ across ranks.

    Example:
    ```python
    train = keras_dist.data.parquet("train/*.parquet", x=["age", "height"], y="weight")
    ```
    """

    def make_source() -> ShardSource:
        options = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        paths = expanded(files)
        names = _with_matrices(x if y is None else (x, y))
        facts = [*facts_of_files(paths), Fact("the names of the columns", repr(names))]
        return ShardSource(ParquetFiles(names), paths, options, unreadable, facts)

    return consistency.prepare(make_source)


def names_in(data: Any) -> list[str]:
    """Returns the distinct names in a structure, in order."""
    return list(dict.fromkeys(name for _, name in leaves(data, "data")))


# --- `.npz` files


class NpzFiles:
    """Files written by `numpy.savez`."""

    def __init__(self, names: Any):
        self._names = names

    def look(self, path: str) -> Found:
        """Reads the headers of the arrays."""
        headers = {}
        with zipfile.ZipFile(path) as archive:
            for name in names_in(self._names):
                if f"{name}.npy" not in archive.namelist():
                    known = ", ".join(n.removesuffix(".npy") for n in archive.namelist())
                    raise errors.DataError(
                        f"an array {name!r} in {path}", known, "Pass one of these."
                    )
                with archive.open(f"{name}.npy") as file:
                    headers[name] = _header(file)
        lengths = {shape[:1] for shape, _ in headers.values()}
        if len(lengths) != 1 or () in lengths:
            shapes = ", ".join(f"{name} {shape}" for name, (shape, _) in headers.items())
            remedy = "Write one entry per sample into each array."
            raise errors.DataError(f"arrays of equal length in {path}", shapes, remedy)
        layout = tuple(
            (name, dtype.newbyteorder("=").str, shape[1:])
            for name, (shape, dtype) in headers.items()
        )
        return Found(lengths.pop(), layout, self._names)

    def reader(self, locations: Sequence[Location], found: Found) -> Read:
        return CachedShards(self._load, locations, found).read

    def _load(self, location: Location) -> dict[str, np.ndarray]:
        with np.load(location.path) as arrays:
            return {name: arrays[name] for name in names_in(self._names)}


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = read[version](file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    if dtype.kind == "V":  # numpy writes bfloat16 as bytes without a type
        raise ValueError(f"an array of {dtype}, which holds neither numbers nor strings")
    return shape, dtype


# --- Parquet files


class ParquetFiles:
    """Parquet files."""

    def __init__(self, names: Any):
        self._names = names

    def look(self, path: str) -> Found:
        """Reads the footer."""
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            metadata = file.metadata
            lengths = tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))
        layout = tuple(self._layout(name, schema, path) for name in names_in(self._names))
        return Found(lengths, layout, self._names)

    def _layout(self, name: str, schema: Any, path: str) -> tuple[str, str, tuple[int, ...]]:
        columns = _columns_in(name)
        if missing := [column for column in columns if column not in schema.names]:
            known = ", ".join(schema.names)
            raise errors.DataError(
                f"a column {missing[0]!r} in {path}", known, "Pass one of these."
            )
        kinds = [_kind(schema.field(column).type) for column in columns]
        shape: tuple[int, ...] = (len(columns),)
        if MATRIX not in name and kinds[0] is not None:
            shape = kinds[0][1]
        if any(kind is None or (MATRIX in name and kind[1]) for kind in kinds):
            types = ", ".join(f"{column} {schema.field(column).type}" for column in columns)
            remedy = "Convert the column when the files are written."
            expected = f"columns of numbers, or a column of lists of fixed length, in {path}"
            raise errors.DataError(expected, types, remedy)
        dtype = np.result_type(*(kind[0] for kind in kinds if kind is not None))
        return name, dtype.str, shape

    def reader(self, locations: Sequence[Location], found: Found) -> Read:
        dtypes = {name: dtype for name, dtype, _ in found.layout}

        def load(location: Location) -> dict[str, np.ndarray]:
            import pyarrow.parquet

            columns = [column for name in dtypes for column in _columns_in(name)]
            with pyarrow.parquet.ParquetFile(location.path) as file:
                table = file.read_row_group(location.inner, columns=columns)
            for column in columns:
                self._check_nulls(table.column(column), column, location)
            return {name: _array(table, name, dtype) for name, dtype in dtypes.items()}

        return CachedShards(load, locations, found).read

    def _check_nulls(self, values: Any, column: str, location: Location) -> None:
        """Raises if a column has nulls that numpy has no value for; of floats they are NaN."""
        import pyarrow.types

        kind, count = values.type, 0
        if pyarrow.types.is_fixed_size_list(kind):
            kind, count = kind.value_type, values.null_count
            values = values.combine_chunks().flatten()
        if not pyarrow.types.is_floating(kind):
            count += values.null_count
        if count:
            raise errors.DataError(
                f"column {column!r} of {location.path} to have no nulls, which {kind} cannot hold",
                f"{count} in row group {location.inner}",
                "Fill them when the files are written, or write floats, whose nulls become NaN.",
            )


def _with_matrices(names: Any) -> Any:
    """Replaces each list of names by one string in which each name ends in a tab."""
    if isinstance(names, list):
        return "".join(f"{name}{MATRIX}" for name in names)
    if isinstance(names, dict):
        return {key: _with_matrices(value) for key, value in names.items()}
    return tuple(map(_with_matrices, names)) if isinstance(names, tuple) else names


def _columns_in(name: str) -> list[str]:
    return name.removesuffix(MATRIX).split(MATRIX)


def _kind(kind: Any) -> tuple[np.dtype, tuple[int, ...]] | None:
    """Returns dtype and row shape of a column; `None` if the column is not numeric."""
    import pyarrow.types

    shape: tuple[int, ...] = ()
    if pyarrow.types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (kind.list_size,)
    numbers = (pyarrow.types.is_integer, pyarrow.types.is_floating, pyarrow.types.is_boolean)
    if not any(is_number(kind) for is_number in numbers):
        return None
    return np.dtype(kind.to_pandas_dtype()), shape


def _array(table: Any, name: str, dtype: str) -> np.ndarray:
    columns = [_column(table.column(column)) for column in _columns_in(name)]
    array = np.stack(columns, axis=1) if MATRIX in name else columns[0]
    return array.astype(dtype, copy=False)


def _column(column: Any) -> np.ndarray:
    values = column.combine_chunks()
    if hasattr(values.type, "list_size"):
        numbers = values.flatten().to_numpy(zero_copy_only=False)
        return numbers.reshape(-1, values.type.list_size)
    return values.to_numpy(zero_copy_only=False)
