"""`shard`: distributes data of any kind over the ranks of the job, by the module of its kind."""

import dataclasses
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_dist import errors, runtime
from keras_dist.data import arrays, consistency, epochs, files
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.nested import is_a, is_tensor, is_tf_dataset
from keras_dist.data.partition import Remainder, Shuffle
from keras_dist.data.shard_options import ShardOptions, wrong_kind
from keras_dist.runtime.process_sets import ProcessSet


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
    process_set: ProcessSet | None = None,
) -> Any:
    """Returns the shard of this rank in batches, for `fit` or `evaluate`.

    The shards of all ranks together are the whole data set, once per epoch. Every rank has the
    same number of steps; otherwise a rank would wait for the others at the end of an epoch. Pass
    the whole data set, unshuffled, on every rank. It works the same with one rank.

    ======================================  =============================================
    data                                    result
    ======================================  =============================================
    arrays of numpy, pandas or a            `tf.data.Dataset` of batches with Keras on
    framework, alone or in tuples,          TensorFlow, else `keras.utils.PyDataset`;
    lists and dicts                         sample i belongs to rank `i % size`.
                                            `batch_size` defaults to 32
    torch `Dataset`, or `DataLoader`        `DataLoader` with a sampler of this rank; its
                                            options are kept; sample i to rank `i % size`
    any object with a length whose          as arrays; `data[i]` is a sample, nested like a
    `data[i]` is a sample, as of grain      batch
    `keras.utils.PyDataset`                 `PyDataset`, with its workers; batch i belongs to
                                            rank `i % size`; at least `size` batches
    function that returns a generator, an   `PyDataset`; each rank reads all, and element i
    iterable, an iterator                   belongs to rank `i % size`. With `batch_size`
                                            elements are samples, else batches. Without
                                            `steps` it is read once, now, to count; an
                                            iterator needs `steps`
    `tf.data.Dataset` of single samples,    `tf.data.Dataset` of batches; sample i belongs
    with `batch_size`                       to rank `i % size`
    `tf.data.Dataset` of batches, without   `tf.data.Dataset`; batch i belongs to rank
    `batch_size`                            `i % size`
    list of files, with `reader`            `tf.data.Dataset` of batches; file i belongs to
                                            rank `i % size`. With fewer files than ranks
                                            all read all files and shard the samples.
                                            `batch_size` defaults to 32
    list of files, without `reader`         list of the file names of this rank
    ======================================  =============================================

    If the samples do not divide evenly, with N samples, n ranks and batch size b:

    - `"uneven"`: every sample exactly once. Ranks differ by at most one sample. There are
      `ceil(floor(N / n) / b)` steps, the last with 1 to b + 1 samples on each rank. For data of
      batches, the last round and the remaining batches are pooled, and the last step has an even
      share of their rows, up to twice a batch; rows of different shapes need `"pad"` or
      `"drop"`. Samples and a `batch_size` are cheaper. For files, the rank with most samples
      determines the number of steps, and the others use smaller batches.
    - `"pad"`: every sample at least once, and all batches of a step have the same size. Ranks with
      one sample less repeat one: `n * ceil(N / n) - N` samples in all. For data of batches, the
      ranks without a last batch repeat one of another rank. For files, every rank repeats samples
      until all have as many as the rank with most.
    - `"drop"`: all batches are full. The last `N % n` samples are dropped, and those that do not
      fill a batch, others in every epoch if shuffled. A rank with fewer than b samples has one
      batch of `floor(N / n)`. For data of batches, the last `N % n` are dropped.

    Without shuffling, the batches of all ranks at step k are together batch k of one process with
    batch size `n * b`; a last batch with fewer samples than ranks is merged with the one before.

    Collective: every rank, with the same arguments; blocks, to check that all ranks have the same
    data in the same order. An error on one rank is raised on all.

    Args:
        data: one of the kinds above, complete on every rank; unshuffled, or shuffled with a fixed
            seed that is the same on all ranks.
        batch_size: number of samples of this rank in a step; the global batch is `batch_size`
            times the number of ranks. For a `tf.data.Dataset`, `None` means that its elements are
            batches.
        shuffle: whether every rank shuffles its shard in every epoch. Pass `False` to evaluate or
            predict. `"global"`: one order of all data for each epoch, which does not depend on the
            number of ranks: step k has the same samples for equal global batches. A
            `tf.data.Dataset` that ends in `shuffle`, or in `shuffle` and `batch`, is shuffled here
            instead, with a buffer of the same size. Defaults to `True` for samples and for a
            `PyDataset`.
        seed: integer seed of the orders, combined with the rank and the epoch: the same seed
            gives the same run, also after `BackupAndRestore`. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, see above. Defaults to `"uneven"`.
        steps: number of batches in an epoch of each rank, for data that is endless or of unknown
            length, or to end an epoch early. Iterating raises if data of unknown length ends
            before. Prefer it to `steps_per_epoch` of `fit`. Defaults to all batches.
        reader: function from a list of file names to a `tf.data.Dataset` of samples, the same at
            every call. Without `steps`, each rank reads its files once, now, to count the samples,
            unless the data set knows its length.
        shuffle_buffer: size of the shuffle buffer of a tf.data pipeline, in samples. Defaults to
            the samples of 256 MiB, at most 65536. Arrays are shuffled completely.
        global_batch_size: number of samples of all ranks in a step, instead of `batch_size`; a
            multiple of the number of ranks.
        batched: whether the items of a data set are batches, where that is not known.
        process_set: the ranks that the data is for, as in `keras_dist.callbacks`. Defaults to all.

    Returns:
        See the table. For a `tf.data.Dataset` Keras warns that `fit` does not shuffle it; pass
        `shuffle=False` to `fit` to avoid the warning. Each loop of a script over the result is
        the next epoch, in the order that `fit` has in that epoch; see `set_epoch`.

    Raises:
        DataError: the data is too small, endless, of unknown length, of unequal lengths or
            in an order that differs between ranks.
        ArgumentError: an argument has an invalid value, or is not defined for this data.
        ArgumentTypeError: data or an argument is of an unknown type.
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

    def make_source() -> consistency.Source:
        options = ShardOptions(
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
        return _source(data, options)

    with runtime.fit_within(process_set):
        return consistency.prepare(make_source)


def sample(
    data: Any,
    batch_size: int | None = None,
    *,
    seed: int = 0,
    steps: int | None = None,
    global_batch_size: int | None = None,
) -> Any:
    """Returns batches that this rank draws at random from the whole data set, for `fit`.

    Each rank draws from a random stream of its own: ranks have different batches, and within an
    epoch a sample may occur several times or not at all. To use each sample once per epoch, use
    `shard`.

    Samples are drawn with replacement. A `tf.data.Dataset`, which is sequential, is repeated, and
    samples are drawn from a buffer, as by `shuffle`.

    Collective: every rank, with the same arguments; blocks.

    Args:
        data: arrays, pandas, data sets with a length or a `tf.data.Dataset` of samples, as for
            `shard`; of a `PyDataset` batches are drawn.
        batch_size: number of samples of this rank in a step. Defaults to 32.
        seed: integer seed, combined with the rank and the epoch. Defaults to 0.
        steps: number of batches in an epoch of each rank. Defaults to the steps in which all ranks
            together draw as many samples as there are.
        global_batch_size: number of samples of all ranks in a step, instead of `batch_size`.

    Returns:
        As `shard`.

    Raises:
        KerasDistError: as `shard`.

    Example:
    ```python
    train = keras_dist.data.sample((x_train, y_train), batch_size=64, seed=1)
    ```
    """

    def make_source() -> consistency.Source:
        options = ShardOptions(
            batch_size,
            seed=seed,
            steps=steps,
            global_batch_size=global_batch_size,
            draws=True,
        )
        if is_tf_dataset(data) and options.batch_size is None:
            options = dataclasses.replace(options, batched=False)
        return _source(data, options)

    return consistency.prepare(make_source)


def steps_per_epoch(
    samples: int,
    batch_size: int | None = None,
    *,
    global_batch_size: int | None = None,
    remainder: Remainder = "uneven",
) -> int:
    """Returns the number of batches of each rank in an epoch of `shard`.

    Args:
        samples: number of samples of the whole data set.
        batch_size: number of samples of a rank in a step. Defaults to 32.
        global_batch_size: number of samples of all ranks in a step, instead of `batch_size`.
        remainder: as for `shard`. Defaults to `"uneven"`.

    Raises:
        DataError: there are fewer samples than ranks.
        ArgumentError: an argument has an invalid value.

    Example:
    ```python
    steps = keras_dist.data.steps_per_epoch(len(x_train), batch_size=64)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10 * steps)
    ```
    """
    options = ShardOptions(batch_size, remainder=remainder, global_batch_size=global_batch_size)
    return options.epoch_plan(samples, options.batch_size or DEFAULT_BATCH_SIZE).steps


def set_epoch(data: Any, epoch: int) -> None:
    """Sets the epoch of the next loop over a data set, as in a loop that is resumed.

    Without it, the first loop is epoch 0, and each further one is the next epoch.

    Local: no other rank takes part. Call it on every rank, with the same epoch.

    Args:
        data: what `shard` or a function for files returned.
        epoch: number of the epoch, at least 0.

    Raises:
        ArgumentError: `data` has no epochs, because keras_dist did not make it or its order is
            that of its source; or `epoch` is negative.

    Example:
    ```python
    train = keras_dist.data.shard((x_train, y_train), batch_size=64)
    keras_dist.data.set_epoch(train, 1)
    for epoch in range(1, 3):
        for x, y in train:
            ...
    ```
    """
    known = epochs.of(data)
    if known is None or epoch < 0:
        raise errors.ArgumentError(
            "data of keras_dist.data, and an epoch of at least 0",
            f"an object of type {type(data).__name__}, epoch {epoch}",
            "Pass the result of shard(); what is made from it by map() or batch() has no "
            "epochs of its own.",
        )
    known.number = epoch


def _source(data: Any, options: ShardOptions) -> consistency.Source:
    if files.are_files(data):
        return files.source_of_files(data, options)
    if is_tf_dataset(data):
        from keras_dist.data.tf_dataset import TfSource

        return TfSource(data, options)
    if isinstance(data, tuple | list | dict) or (is_tensor(data) and not isinstance(data, Mapping)):
        return arrays.ArraySource(data, options)
    if _is_torch(data):
        from keras_dist.data.torch_loader import TorchSource

        return TorchSource(data, options)
    if isinstance(data, Mapping) and not isinstance(
        next(iter(data.keys()), None), numbers.Integral
    ):
        raise errors.ArgumentTypeError(
            "a dict of arrays", f"a {type(data).__name__}", "Pass dict(data), or what it holds."
        )
    is_text = isinstance(data, str | bytes | os.PathLike)
    has_items = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not is_text
    # All data sets of torch have `__getitem__`, which raises in those that are iterated.
    has_items = has_items and not is_a(data, "torch", "IterableDataset")
    if has_items or is_a(data, "keras", "PyDataset"):
        return arrays.SampleSource(data, options)
    if (callable(data) or hasattr(data, "__iter__")) and not is_text:
        from keras_dist.data.streams import source_of_stream

        return source_of_stream(data, options)
    raise wrong_kind(
        "data to be numpy arrays (alone or in tuples, lists and dicts), a tf.data.Dataset, a "
        "PyDataset, a torch Dataset or DataLoader, an object with a length and samples by index, "
        "a function that returns a generator, an iterator, or a list of file names",
        data,
    )


def _is_torch(data: Any) -> bool:
    """Returns whether data is a map-style data set of torch, or a loader of one."""
    # A loader takes any object with a length and samples by index, such as a list.
    if is_a(data, "torch", "DataLoader"):
        return not is_a(data.dataset, "torch", "IterableDataset")
    return is_a(data, "torch", "Dataset") and not is_a(data, "torch", "IterableDataset")
