"""Rows of HDF5 and `.npy` files that need not fit into memory."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

from keras_dist.data import consistency
from keras_dist.data.files import Paths, Unreadable
from keras_dist.data.nested import leaves
from keras_dist.data.partition import Remainder, Shuffle
from keras_dist.data.readers import RowSegment, segment_of_npy, segments_of_hdf5
from keras_dist.data.row_source import MpiIo, RowSource
from keras_dist.data.shard_options import ShardOptions


def hdf5(
    files: Paths,
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
    """Returns this rank's batches of data sets in HDF5 files, for `fit`.

    The data need not fit into memory. Each rank reads contiguous blocks of rows and prefetches the
    next block in a thread, so a rank holds two blocks. Shuffling permutes the blocks each epoch,
    and the rows within each block. The order of the blocks is the same for any number of ranks.

    The rows of all files form one data set. Layouts may be contiguous, chunked, compressed or
    virtual. Blocks consist of whole chunks if the files hold whole chunks. The process that reads
    opens the files on its first read.

    Collective: every rank must call it with the same arguments. Blocks until all ranks have
    inspected the files. An error on one rank is raised on all ranks.

    Args:
        files: path of a file, or a list of them.
        x: name of a data set, such as `"train/images"`, or nested tuples, lists and dicts of
            names. A batch has the same structure; arrays have shape `(batch, ...)`.
        y: the same for the labels. Defaults to none: a batch is `x` alone.
        batch_size: number of samples per step on this rank. Defaults to 32.
        shuffle: whether each epoch has a new order. Pass False to evaluate or predict.
            `"global"`: one order of the rows, independent of the number of ranks, see `shard`; all
            ranks read every block at about the same time, and each keeps its rows. Defaults to
            True.
        seed: integer that, with the epoch, determines the order. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as in `shard`. Defaults to `"uneven"`.
        steps: number of batches per epoch on each rank. Defaults to all.
        block: number of rows per read, rounded up to whole chunks. If neighbouring rows are
            similar, pass a small number: a batch larger than a block mixes several blocks.
            Defaults to the rows in 16 MiB, fewer for small data.
        mpi_io: `"independent"`: each rank reads through `MPI.File`, one block ahead. Data sets
            must be contiguous. Parallel HDF5 is not required. Defaults to `None`: reads without
            MPI.
        readers: number of ranks that read, each also for its neighbours, to which it sends their
            blocks. Only these ranks need access to the files, and each holds the blocks of all its
            ranks. A batch is then collective, and nothing is prefetched. Defaults to all.
        unreadable: policy for files that a rank cannot read when the data set is created:
            `"raise"` an error that names file and rank, or `"skip"` them on all ranks with a
            message on rank 0. Defaults to `"raise"`.

    Returns:
        A `tf.data.Dataset` with the TensorFlow backend, otherwise a `keras.utils.PyDataset`.

    Raises:
        DataError: a file or a data set is missing, unreadable, locked or not numeric; lengths
            differ; or there are fewer rows than ranks. The message names `HDF5_USE_FILE_LOCKING`
            if a lock is the cause.
        ArgumentError: an argument has an invalid value, or excludes another.
        ArgumentTypeError: an argument has the wrong type.
        MismatchError: files or arguments differ across ranks.

    Example:
    ```python
    train = keras_dist.data.hdf5("train.h5", x="images", y="labels", batch_size=64)
    model.fit(train, callbacks=keras_dist.callbacks())
    ```
    """

    def make_source() -> RowSource:
        options = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        paths = [files] if isinstance(files, str | PathLike) else list(files)
        names = x if y is None else (x, y)
        how = block, mpi_io, readers, unreadable
        return RowSource(segments_of_hdf5, paths, names, options, *how)

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
    """Returns this rank's batches of arrays in `.npy` files, for `fit`.

    Equivalent to `hdf5` with one file per array. Collective: every rank must call it with the same
    arguments.

    Args:
        x: path of a file, or nested tuples, lists and dicts of paths. A batch has the same
            structure.
        y: the same for the labels. Defaults to none: a batch is `x` alone.
        batch_size: see `hdf5`, as for all further arguments.
        shuffle: see `hdf5`.
        seed: see `hdf5`.
        remainder: see `hdf5`.
        steps: see `hdf5`.
        block: see `hdf5`.
        mpi_io: see `hdf5`.
        readers: see `hdf5`.

    Returns:
        See `hdf5`.

    Raises:
        KerasDistError: see `hdf5`.

    Example:
    ```python
    train = keras_dist.data.npy("x.npy", "y.npy", batch_size=64, mpi_io="independent")
    ```
    """

    def make_source() -> RowSource:
        options = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        data = x if y is None else (x, y)
        paths = [path for _, path in leaves(data, "data")]

        def look(_: str, names: Sequence[str]) -> list[RowSegment]:
            return [segment_of_npy(name) for name in names]

        return RowSource(look, paths[:1], data, options, block, mpi_io, readers)

    return consistency.prepare(make_source)
