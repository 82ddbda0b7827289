"""The data of a job, shared out over its ranks: `shard`.

Knows which kind of data is handed to which module; imports no framework before data of it
comes in.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist.data import agreement, arrays, files
from keras_dist.data.partition import Remainder
from keras_dist.data.terms import Terms

__all__ = ["shard"]


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    remainder: Remainder = "uneven",
    steps: int | None = None,
    reader: Callable[[Sequence[str]], Any] | None = None,
    shuffle_buffer: int | None = None,
) -> Any:
    """Returns this rank's part of the data, in batches, ready for `fit` or `evaluate`.

    All parts together are the whole data set, once an epoch, and every rank has the same
    number of steps: a rank with one step more would wait for ever for the others. Give every
    rank the whole data set, unshuffled; with one rank it works the same.

    ======================================  =============================================
    data                                    what comes back
    ======================================  =============================================
    numpy arrays, alone or in tuples,       `tf.data.Dataset` of batches with Keras on
    lists and dicts                         TensorFlow, else `keras.utils.PyDataset`;
                                            sample i belongs to rank `i % size`.
                                            `batch_size` defaults to 32
    `tf.data.Dataset` of single samples,    `tf.data.Dataset` of batches; sample i belongs
    with `batch_size`                       to rank `i % size`
    `tf.data.Dataset` of batches, without   `tf.data.Dataset`; batch i belongs to rank
    `batch_size`                            `i % size`
    list of files, with `reader`            `tf.data.Dataset` of batches; file i belongs to
                                            rank `i % size`. With fewer files than ranks
                                            all read all files and share out the samples.
                                            `batch_size` defaults to 32
    list of files, without `reader`         list of this rank's file names, nothing else
    ======================================  =============================================

    What happens when the samples do not come out even, with N samples, n ranks, batch b:

    - `"uneven"`: every sample exactly once. Ranks differ by at most one sample. There are
      `ceil(floor(N / n) / b)` steps, the last with 1 to b + 1 samples on each rank.
      Batches of the user: the last round and what is left after it are pooled, and the last
      step has an even share of their rows, up to twice a batch; rows of differing shapes
      need `"pad"` or `"drop"`. Single samples and a `batch_size` are cheaper. Files: the
      rank that holds most sets the number of steps, and the others spread their samples
      over as many, in smaller batches.
    - `"pad"`: every sample at least once, and the batches of a step are equally large on all
      ranks. Ranks with one sample less repeat one of theirs: `n * ceil(N / n) - N` in all.
      Batches of the user, whatever their size: as many of the last are handed out again as
      ranks have none. Files: every rank repeats its own until all have as many as the rank
      with most.
    - `"drop"`: all batches are full, on all ranks. The last `N % n` samples are left out,
      and of the rest what does not fill a batch, another choice each epoch when shuffled.
      With fewer than b samples a rank has one batch of `floor(N / n)`. Batches of the user:
      the last `N % n` are left out, whatever their size.

    Unshuffled, the batches of all ranks at step k are together batch k of one process with
    batch size `n * b`; only a last one with fewer samples than ranks joins the one before.

    Collective: every rank, with the same arguments; blocks, to make sure that all ranks have
    the same data in the same order. An error on one rank is raised on all.

    Args:
        data: one of the kinds above, the whole of it on every rank. Unshuffled, or shuffled
            with a fixed seed, the same on all ranks.
        batch_size: samples in each step on this rank; the global batch is `batch_size` times
            the number of ranks. For a `tf.data.Dataset`, `None` means that its elements are
            batches already.
        shuffle: whether every rank draws a new order of its part for each epoch. Defaults to
            True where single samples are shared out. Pass False to evaluate or predict.
        seed: whole number from which, with rank and epoch, the orders follow: the same
            number gives the same run, and of arrays also when `BackupAndRestore` resumes it.
            In a tf.data pipeline TensorFlow's global seed counts too, where one is set.
            Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, see above. Defaults to `"uneven"`.
        steps: batches in an epoch of each rank, where the data is endless or of unknown
            length, or where an epoch is to end early. Then there are exactly so many; of
            data of unknown length, iterating raises when it ends before. Prefer it to
            `steps_per_epoch` of `fit`. Defaults to all there are.
        reader: function that takes a list of file names and returns a `tf.data.Dataset` of
            single samples, the same every time. Without `steps`, each rank reads its files
            once more, now, to count the samples, unless the data set knows their number.
        shuffle_buffer: samples of a tf.data pipeline among which the next is drawn. Defaults
            to as many as fit into 256 MiB, at most 65536. Arrays are shuffled completely.

    Returns:
        See the table. Of a `tf.data.Dataset` Keras notes, as a warning, that `fit` does not
        shuffle it; pass `shuffle=False` to `fit` to be spared.

    Raises:
        DataError: the data is too small, endless, of unknown length, of unequal lengths or
            in an order that differs from rank to rank.
        ArgumentError: an argument has an impossible value, or no meaning for this data.
        ArgumentTypeError: data or an argument is of an unknown kind.
        MismatchError: the ranks have different data or arguments.

    Example:
    ```python
    train = keras_dist.data.shard((x_train, y_train), batch_size=64)
    test = keras_dist.data.shard((x_test, y_test), batch_size=64, shuffle=False)
    model.fit(train, validation_data=test, callbacks=keras_dist.callbacks())

    records = keras_dist.data.shard(
        sorted(pathlib.Path("train").glob("*.tfrecord")),
        batch_size=64,
        reader=lambda names: tf.data.TFRecordDataset(names).map(parse),
    )
    ```
    """

    def survey() -> agreement.Source:
        terms = Terms(batch_size, shuffle, seed, remainder, steps, reader, shuffle_buffer)
        return _source(data, terms)

    part = agreement.prepare(survey)
    if _is_tf_dataset(part):
        # `fit` shuffles arrays only and says so of every other data, on every rank and in
        # every call; what comes from here has been shuffled as its caller wanted.
        warnings.filterwarnings("ignore", "`shuffle=True` was passed, but will be ignored")
    return part


def _source(data: Any, terms: Terms) -> agreement.Source:
    if files.are_files(data):
        return files.source_of_files(data, terms)
    if _is_tf_dataset(data):
        from keras_dist.data.tf_dataset import TfSource

        return TfSource(data, terms)
    if isinstance(data, np.ndarray | tuple | list | dict):
        return arrays.ArraySource(data, terms)
    raise terms.wrong_kind(
        "data to be numpy arrays (alone or in tuples, lists and dicts), a tf.data.Dataset, "
        "or a list of file names",
        data,
    )


def _is_tf_dataset(data: Any) -> bool:
    """Tells whether this is a `tf.data.Dataset`, without importing TensorFlow."""
    return any(
        kind.__name__ == "DatasetV2" and kind.__module__.startswith("tensorflow.")
        for kind in type(data).__mro__
    )
