"""`shard`: data of any kind, shared out over the ranks of the job.

Knows which kind of data is handed to which module; imports no framework before data of it
comes in.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist.data import arrays, consistency, files, samples, streams
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.kinds import is_a, is_tensor, is_tf_dataset
from keras_dist.data.order import Shuffle
from keras_dist.data.partition import Remainder, plan_samples
from keras_dist.data.shard_options import ShardOptions

__all__ = ["sample", "shard", "steps_per_epoch"]


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: Shuffle | None = None,
    seed: int = 0,
    remainder: Remainder = "uneven",
    steps: int | None = None,
    reader: Callable[[Sequence[str]], Any] | None = None,
    shuffle_buffer: int | None = None,
    global_batch_size: int | None = None,
    batched: bool | None = None,
) -> Any:
    """Returns this rank's part of the data, in batches, ready for `fit` or `evaluate`.

    All parts together are the whole data set, once an epoch, and every rank has the same
    number of steps: a rank with one step more would wait for ever for the others. Give every
    rank the whole data set, unshuffled; with one rank it works the same.

    ======================================  =============================================
    data                                    what comes back
    ======================================  =============================================
    arrays of numpy, pandas or a            `tf.data.Dataset` of batches with Keras on
    framework, alone or in tuples,          TensorFlow, else `keras.utils.PyDataset`;
    lists and dicts                         sample i belongs to rank `i % size`.
                                            `batch_size` defaults to 32
    torch `Dataset`, or `DataLoader`        `DataLoader` with a sampler of this rank; its
                                            options are kept; sample i to rank `i % size`
    anything with a length whose            as arrays; `data[i]` is a sample, nested as a
    `data[i]` is a sample, as of grain      batch is to be
    `keras.utils.PyDataset`                 `PyDataset`, with its workers; batch i belongs to
                                            rank `i % size`; there are at least `size`
    function that makes a generator, what   `PyDataset`; each rank reads all, and element i
    can be iterated over, an iterator       belongs to rank `i % size`. With `batch_size`
                                            elements are samples, else batches. Without
                                            `steps` it is read once, now, to count; an
                                            iterator needs `steps`
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
            True where single samples are shared out, and for a `PyDataset`. Pass False to
            evaluate or predict. `"global"`: one new order of the whole for each epoch, which
            does not depend on the number of ranks: step k has the same samples wherever the
            global batch is as large. A `tf.data.Dataset` that ends in `shuffle`, or in
            `shuffle` and `batch`, is shuffled here in their place, in a buffer as large.
        seed: whole number from which, with rank and epoch, the orders follow: the same
            number gives the same run, also when `BackupAndRestore` resumes it. Defaults to 0.
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

    def survey() -> consistency.Source:
        terms = ShardOptions(
            batch_size,
            shuffle,
            seed,
            remainder,
            steps,
            reader,
            shuffle_buffer,
            global_batch_size,
            batched,
        )
        return _source(data, terms)

    return consistency.prepare(survey)


def sample(
    data: Any,
    batch_size: int | None = None,
    *,
    seed: int = 0,
    steps: int | None = None,
    global_batch_size: int | None = None,
) -> Any:
    """Returns batches that this rank draws at random from the whole data set, ready for `fit`.

    Each rank draws from a stream of its own, so ranks see other batches, and no rank knows what
    the others have drawn: within an epoch a sample may come several times or not at all. To see
    each once an epoch, use `shard`.

    Samples are drawn with replacement. Those of a `tf.data.Dataset`, which can only be read one
    after another, are read over and over and drawn from a buffer, as by `shuffle`.

    Collective: every rank, with the same arguments; blocks.

    Args:
        data: arrays, pandas, data sets with a length or a `tf.data.Dataset` of single samples, as
            for `shard`; of a `PyDataset` batches are drawn.
        batch_size: samples in each step on this rank. Defaults to 32.
        seed: whole number from which, with rank and epoch, all follows. Defaults to 0.
        steps: batches in an epoch of each rank. Defaults to as many as all ranks together need
            for as many samples as there are.
        global_batch_size: samples in each step on all ranks, in place of `batch_size`.

    Returns:
        As `shard`.

    Raises:
        KerasDistError: as `shard`.

    Example:
    ```python
    train = keras_dist.data.sample((x_train, y_train), batch_size=64, seed=1)
    ```
    """

    def survey() -> consistency.Source:
        terms = ShardOptions(
            batch_size,
            seed=seed,
            steps=steps,
            global_batch_size=global_batch_size,
            draws=True,
        )
        if is_tf_dataset(data) and terms.batch_size is None:
            terms = dataclasses.replace(terms, batched=False)
        return _source(data, terms)

    return consistency.prepare(survey)


def steps_per_epoch(
    samples: int,
    batch_size: int | None = None,
    *,
    global_batch_size: int | None = None,
    remainder: Remainder = "uneven",
) -> int:
    """Returns the number of batches of each rank in an epoch, as `shard` has it.

    Args:
        samples: number of samples of the whole data set.
        batch_size: samples in each step on a rank. Defaults to 32.
        global_batch_size: samples in each step on all ranks, in place of `batch_size`.
        remainder: as for `shard`. Defaults to `"uneven"`.

    Raises:
        DataError: there are fewer samples than ranks.
        ArgumentError: an argument has an impossible value.

    Example:
    ```python
    steps = keras_dist.data.steps_per_epoch(len(x_train), batch_size=64)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10 * steps)
    ```
    """
    terms = ShardOptions(batch_size, remainder=remainder, global_batch_size=global_batch_size)
    terms.need_samples(samples)
    each = terms.batch_size or DEFAULT_BATCH_SIZE
    return plan_samples(samples, terms.size, terms.rank, each, remainder).steps


def _source(data: Any, terms: ShardOptions) -> consistency.Source:
    for is_this, source_of in KINDS:
        if is_this(data):
            return source_of(data, terms)
    raise terms.wrong_kind(
        "data to be numpy arrays (alone or in tuples, lists and dicts), a tf.data.Dataset, a "
        "PyDataset, a torch Dataset or DataLoader, something with a length and samples by number, "
        "a function that makes a generator, an iterator, or a list of file names",
        data,
    )


def _tf_source(data: Any, terms: ShardOptions) -> consistency.Source:
    from keras_dist.data.tf_dataset import TfSource

    return TfSource(data, terms)


def _torch_source(data: Any, terms: ShardOptions) -> consistency.Source:
    from keras_dist.data.torch_loader import TorchSource

    return TorchSource(data, terms)


def _is_torch(data: Any) -> bool:
    """Tells whether this is a torch data set that knows samples by number, or a loader of one."""
    inner = data.dataset if is_a(data, "torch", "DataLoader") else data
    return is_a(inner, "torch", "Dataset") and not is_a(inner, "torch", "IterableDataset")


def _is_array(data: Any) -> bool:
    return isinstance(data, tuple | list | dict) or is_tensor(data)


def _has_samples(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not _is_text(data)


def _is_text(data: Any) -> bool:
    return isinstance(data, str | bytes | os.PathLike)


def _is_stream(data: Any) -> bool:
    return (callable(data) or hasattr(data, "__iter__")) and not _is_text(data)


# The first that fits counts.
KINDS: list[tuple[Callable[[Any], bool], Callable[[Any, ShardOptions], consistency.Source]]] = [
    (files.are_files, files.source_of_files),
    (is_tf_dataset, _tf_source),
    (_is_array, arrays.ArraySource),
    (lambda data: is_a(data, "keras", "PyDataset"), samples.PyDatasetSource),
    (_is_torch, _torch_source),
    (_has_samples, samples.SampleSource),
    (_is_stream, streams.StreamSource),
]
