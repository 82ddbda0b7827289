"""Rows of HDF5 and `.npy` files that may be larger than memory; each rank reads its own."""

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
    """Generates the batches of this rank from data sets in HDF5 files, for `fit`.

    The data need not fit into memory. A rank reads blocks of consecutive rows, each block on one
    rank, and a thread reads the next block while the current one is used: a rank keeps two blocks
    and the batches in memory. In every epoch the order of the blocks is shuffled, then the rows of
    each block. The order of the blocks does not depend on the number of ranks.

    The rows of all files are one data set. Layouts may be contiguous, chunked, compressed or
    virtual; blocks consist of whole chunks, if the files do. The process that reads opens the files
    at its first read.

    Collective: every rank, with the same arguments; blocks until all ranks have inspected the
    files. An error on one rank is raised on all.

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
        steps: number of batches in an epoch of each rank, to end it early. Defaults to all.
        block: number of rows to read at once, rounded up to whole chunks. Choose a small number if
            consecutive rows are alike: a batch larger than a block has rows of several blocks.
            Defaults to the rows of 16 MiB, fewer if there is little data.
        mpi_io: `"independent"`: each rank reads through `MPI.File` separately, one block ahead.
            `"collective"`: all ranks read through `MPI.File` together, when training needs a block;
            nothing is read ahead, as a thread could wait for ranks that have stopped. Data sets
            must be contiguous, and in one file for `"collective"`. Parallel HDF5 is not needed.
            Defaults to `None`: no MPI.
        readers: number of ranks that read, for themselves and for the others, to which a thread
            sends blocks ahead of their use. Only these ranks need access to the files. Defaults to
            all ranks.
        unreadable: what to do with files that a rank cannot read when the data set is made:
            `"raise"` an error that names file and rank, or `"skip"` them on all ranks; rank 0
            logs them. Defaults to `"raise"`.

    Returns:
        `tf.data.Dataset` on the TensorFlow backend, `keras.utils.PyDataset` on others.

    Raises:
        DataError: a file or a data set is missing, unreadable, locked or not an array of numbers;
            lengths differ; or there are fewer rows than ranks.
        ArgumentError: an argument has an invalid value, or excludes another one.
        ArgumentTypeError: an argument is of the wrong type.
        MismatchError: the ranks have different files or arguments.

    Example:
    ```python
    train = keras_dist.data.hdf5("train.h5", x="images", y="labels", batch_size=64)
    model.fit(train, callbacks=keras_dist.callbacks())
    ```
    """

    def make_source() -> RowSource:
        terms = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        method = ReadMethod(block, mpi_io, readers, unreadable, terms)
        paths = [files] if isinstance(files, str | PathLike) else list(files)
        return RowSource(segments_of_hdf5, paths, x if y is None else (x, y), method)

    return consistency.prepare(make_source)


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
    """Generates the batches of this rank from arrays in `.npy` files, for `fit`.

    As `hdf5`, with one file for each array. Collective: every rank, with the same arguments.

    Args:
        x: path of a file, or nested tuples, lists and dicts of paths.
        y: the same for the labels. Defaults to `None`.
        batch_size: see `hdf5`.
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

    def make_source() -> RowSource:
        terms = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        method = ReadMethod(block, mpi_io, readers, "raise", terms)
        data = x if y is None else (x, y)
        paths = [path for _, path in leaves(data, "data")]
        return RowSource(_inspect, paths[:1], data, method)

    return consistency.prepare(make_source)


def _inspect(_: str, paths: Sequence[str]) -> list[Segment]:
    return [segment_of_npy(path) for path in paths]
