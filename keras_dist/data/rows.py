"""Rows of HDF5 and `.npy` files, larger than memory: each rank reads its own."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

from keras_dist.data import consistency
from keras_dist.data.nested import leaves
from keras_dist.data.order import Shuffle
from keras_dist.data.partition import Remainder
from keras_dist.data.row_source import MpiIo, ReadMethod, RowSource, Unreadable
from keras_dist.data.segments import Segment, segment_of_npy, segments_of_hdf5
from keras_dist.data.shard_options import ShardOptions

__all__ = ["hdf5", "npy"]

Path = str | PathLike[str]


def hdf5(
    files: Path | Sequence[Path],
    x: Any,
    y: Any = None,
    batch_size: int = 32,
    *,
    shuffle: Shuffle = True,
    seed: int = 0,
    remainder: Remainder = "uneven",
    steps: int | None = None,
    block: int | None = None,
    mpi_io: MpiIo | None = None,
    readers: int | None = None,
    unreadable: Unreadable = "raise",
) -> Any:
    """Returns this rank's part of data sets in HDF5 files, in batches, ready for `fit`.

    The data need not fit into memory. Rows are read in blocks that lie in one piece in a file,
    each by one rank, and a thread reads the next block while one is handed out; so a rank holds
    two blocks, and the batches. Shuffling puts blocks in another order every epoch and rows in
    another order within each block. The order of blocks is the same for any number of ranks.

    Rows of all files count as one data set. Layouts may be contiguous, chunked, compressed or
    virtual; blocks are made of whole chunks, as long as files hold whole chunks. Files are opened
    by the process that reads, when it first does.

    Collective: every rank, with the same arguments; blocks, until all have looked into the files.
    An error on one rank is raised on all.

    Args:
        files: path of a file, or a list of them.
        x: name of a data set, as in `"train/images"`, or nested tuples, lists and dicts of names:
            a batch has the same structure.
        y: the same for the labels. Defaults to none: a batch is `x` alone.
        batch_size: samples in each step on this rank. Defaults to 32.
        shuffle: whether every epoch has an order of its own. Defaults to True. Pass False to
            evaluate or predict. `"global"`: one order of the rows that does not depend on the
            number of ranks, see `shard`. All ranks then read every block, at about the same time,
            and each keeps its rows.
        seed: whole number from which, with the epoch, the orders follow. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as in `shard`. Defaults to `"uneven"`.
        steps: batches in an epoch of each rank, where it is to end early. Defaults to all.
        block: rows that are read at once, rounded up to whole chunks. Where neighbours in a file
            are alike, take few: a batch larger than a block has rows from several. Defaults to
            what 16 MiB hold, less where there is little data.
        mpi_io: `"independent"`: through `MPI.File`, each rank for itself, a block ahead.
            `"collective"`: through `MPI.File`, all ranks at the same time, when training comes to
            a block; nothing is read ahead, since a thread that did so could wait for ranks that
            have stopped. Data sets must be contiguous; for `"collective"`, one file. Parallel
            HDF5 is not needed. Defaults to reading without MPI.
        readers: how many ranks read, for themselves and in a thread for the others, to whom they
            send blocks ahead of their use. Only they need access to the files. Defaults to all.
        unreadable: what becomes of files that some rank cannot read when the data set is made:
            `"raise"` an error that names file and rank, or `"skip"` them on all ranks, which the
            root says. Defaults to `"raise"`.

    Returns:
        `tf.data.Dataset` with Keras on TensorFlow, else `keras.utils.PyDataset`.

    Raises:
        DataError: a file or a data set is missing, unreadable, locked or no array of numbers;
            lengths differ; there are fewer rows than ranks. `HDF5_USE_FILE_LOCKING` is named where
            it helps.
        ArgumentError: an argument has an impossible value, or does not go with another.
        ArgumentTypeError: an argument is of the wrong kind.
        MismatchError: the ranks have different files or arguments.

    Example:
    ```python
    train = keras_dist.data.hdf5("train.h5", x="images", y="labels", batch_size=64)
    model.fit(train, callbacks=keras_dist.callbacks())
    ```
    """

    def survey() -> RowSource:
        terms = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        way = ReadMethod(block, mpi_io, readers, unreadable, terms)
        paths = [files] if isinstance(files, str | PathLike) else list(files)
        return RowSource(segments_of_hdf5, paths, x if y is None else (x, y), way)

    return consistency.prepare(survey)


def npy(
    x: Any,
    y: Any = None,
    batch_size: int = 32,
    *,
    shuffle: Shuffle = True,
    seed: int = 0,
    remainder: Remainder = "uneven",
    steps: int | None = None,
    block: int | None = None,
    mpi_io: MpiIo | None = None,
    readers: int | None = None,
) -> Any:
    """Returns this rank's part of arrays in `.npy` files, in batches, ready for `fit`.

    As `hdf5`, with one file for each array. Collective: every rank, with the same arguments.

    Args:
        x: path of a file, or nested tuples, lists and dicts of paths.
        y: the same for the labels. Defaults to none.
        batch_size: see `hdf5`; so are all that follow.
        shuffle: see `hdf5`.
        seed: see `hdf5`.
        remainder: see `hdf5`.
        steps: see `hdf5`.
        block: see `hdf5`.
        mpi_io: see `hdf5`.
        readers: see `hdf5`.

    Returns:
        As `hdf5`.

    Raises:
        KerasDistError: as `hdf5`.

    Example:
    ```python
    train = keras_dist.data.npy("x.npy", "y.npy", batch_size=64, mpi_io="independent")
    ```
    """

    def survey() -> RowSource:
        terms = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        way = ReadMethod(block, mpi_io, readers, "raise", terms)
        data = x if y is None else (x, y)
        paths = [path for _, path in leaves(data, "data")]
        return RowSource(_look, paths[:1], data, way)

    return consistency.prepare(survey)


def _look(_: str, paths: Sequence[str]) -> list[Segment]:
    return [segment_of_npy(path) for path in paths]
