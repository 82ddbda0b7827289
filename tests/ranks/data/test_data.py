"""`shard` on several ranks: shards cover the data in equal numbers of steps, or all ranks raise."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import keras_dist
from keras_dist import errors
from keras_dist.data import shard

pytestmark = pytest.mark.jobs("tensorflow-1", "tensorflow-3")

BATCH = 4


def size():
    return keras_dist.size()


def total():
    """A number of samples with a remainder for every number of ranks except one."""
    return 12 * size() * BATCH + size() - 1


def epoch_of(part):
    """The sample numbers of one epoch, by batch."""
    return [np.asarray(batch).astype(int).tolist() for batch in part]


def gathered(part):
    """One epoch of every rank."""
    return keras_dist.allgather_object(epoch_of(part))


def flat(epochs):
    return sorted(number for epoch in epochs for batch in epoch for number in batch)


def raised_everywhere(error, culprit, call):
    """Checks that a call raises an error with the rank and the text on every rank."""
    with pytest.raises(error, match=r"^\[rank \d of \d\] Expected .* Received: ") as caught:
        call()
    assert culprit in str(caught.value)
    return keras_dist.allgather_object(str(caught.value))


def numbers(count):
    return tf.data.Dataset.range(count)


def shuffled_before(count, **options):
    """Numbers that are shuffled before a map, so that shard() cannot replace the shuffle."""
    return numbers(count).shuffle(9, **options).map(lambda number: number)


def shuffled_within(count, seed):
    """Numbers that a function of the pipeline shuffles, in parts."""
    return numbers(count).interleave(lambda end: numbers(end).shuffle(3, seed=seed))


# --- Files


@pytest.fixture
def files(shared_tmp_path):
    """A function that writes files with the given numbers of lines, once for all ranks."""

    def write(*lengths):
        paths = [shared_tmp_path / f"{index}.txt" for index in range(len(lengths))]
        ends = np.cumsum(lengths)
        if keras_dist.rank() == 0:
            for path, length, end in zip(paths, lengths, ends, strict=True):
                path.write_text("".join(f"{n}\n" for n in range(end - length, end)))
        keras_dist.barrier()
        return paths

    return write


def reader(names):
    return tf.data.TextLineDataset(names).map(tf.strings.to_number)


def test_ranks_read_their_own_files(files):
    lengths = [9 + index % 3 for index in range(2 * size() + 1)]
    part = shard(files(*lengths), BATCH, reader=reader)
    held = [sum(lengths[rank :: size()]) for rank in range(size())]
    for _ in range(2):
        epochs = gathered(part)
        assert flat(epochs) == list(range(sum(lengths)))
        assert {len(epoch) for epoch in epochs} == {-(-max(held) // BATCH)}
        assert [sum(map(len, epoch)) for epoch in epochs] == held


# --- In Keras


@pytest.mark.parametrize(
    "kind", ["arrays", "samples", pytest.param("batches", marks=pytest.mark.tuned)]
)
def test_fit_takes_the_same_steps_on_every_rank(kind):
    x = np.ones((total(), 3), "float32")
    samples = tf.data.Dataset.from_tensor_slices((x, x))
    samples = samples.map(lambda *sample: sample, num_parallel_calls=tf.data.AUTOTUNE)
    part = {
        "arrays": lambda: shard((x, x), BATCH),
        "samples": lambda: shard(samples, BATCH),
        "batches": lambda: shard(samples.batch(BATCH)),
    }[kind]()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    steps = []
    counter = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: steps.append(step)
    )
    model.fit(part, epochs=2, callbacks=[counter], verbose=0, shuffle=False)
    assert steps == list(range(12)) * 2


# --- Caches in files


def cached_last(file, count):
    return numbers(count).cache(file)


def cached_then_shuffled(file, count):
    return numbers(count).cache(file).shuffle(7)


def cached_twice(file):
    return numbers(total()).cache(file).cache(f"{file} again").prefetch(1)


def cached_first(file):
    return numbers(total()).cache(file).map(lambda number: number)


def cached_in_a_zip(file):
    return tf.data.Dataset.zip(numbers(total()).cache(file), numbers(total())).map(lambda a, b: a)


def cached_in_an_interleave(file):
    parts = tf.data.Dataset.range(2)
    return parts.interleave(
        lambda part: numbers(total()).cache(tf.strings.join([file, tf.strings.as_string(part)]))
    ).apply(tf.data.experimental.assert_cardinality(2 * total()))


@pytest.mark.parametrize("make", [cached_last, cached_then_shuffled])
def test_ranks_cache_in_files_of_their_own(shared_tmp_path, make):
    file = str(shared_tmp_path / "rows")
    part = shard(make(file, total()), BATCH)
    for _ in range(2):
        assert flat(gathered(part)) == list(range(total()))
    part = shard(cached_last(file, 5000 * size()), BATCH, shuffle=False)
    reading = iter(part)  # an incomplete cache is discarded
    next(reading)
    keras_dist.barrier()
    written = {path.name.partition("_")[0] for path in shared_tmp_path.iterdir()}
    keras_dist.barrier()
    if size() > 1:
        assert written == {f"rows.rank{rank}" for rank in range(size())}
    del reading


@pytest.mark.parametrize("make", [cached_first, cached_twice, cached_in_a_zip])
def test_a_cache_that_ranks_share_is_refused_unless_it_is_complete(shared_tmp_path, make):
    everything = list(range(total()))
    data = make(str(shared_tmp_path / "rows"))
    if size() == 1:
        assert flat(gathered(shard(data, BATCH))) == everything
    else:
        raised_everywhere(errors.DataError, "rows", lambda: shard(data, BATCH))
    if make is cached_twice:  # has two names
        return
    own = make(str(shared_tmp_path / f"rows-{keras_dist.rank()}"))
    assert flat(gathered(shard(own, BATCH))) == everything
    complete = str(shared_tmp_path / "complete")
    if keras_dist.rank() == 0:
        assert len(list(make(complete))) == total()
    keras_dist.barrier()
    assert flat(gathered(shard(make(complete), BATCH))) == everything


@pytest.mark.parametrize("place", ["x", "validation_data", "evaluate"])
def test_fit_and_evaluate_refuse_a_cache_that_ranks_share(shared_tmp_path, place):
    if size() == 1:
        pytest.skip("one rank shares its files with nobody")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    rows = tf.data.Dataset.from_tensors((np.ones((2, 1)), np.ones((2, 1))))

    def call(name):
        cached = rows.cache(str(shared_tmp_path / name))
        options = {"verbose": 0, "callbacks": keras_dist.callbacks()}
        if place == "evaluate":
            model.evaluate(cached, **options)
        else:
            model.fit(**{"x": rows, place: cached}, **options)

    raised_everywhere(errors.DataError, "rows", lambda: call("rows"))
    call(f"rows-{keras_dist.rank()}")


def test_predict_caches_in_files_of_their_own(shared_tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
    rows = tf.data.Dataset.range(7).map(lambda row: tf.cast([row], "float32")).batch(2)
    for _ in range(2):
        found = keras_dist.predict(model, rows.cache(str(shared_tmp_path / "rows")))
        assert found[:, 0].tolist() == [2.0 * row for row in range(7)]
    if size() > 1:
        between = rows.cache(str(shared_tmp_path / "others")).map(lambda row: row)
        raised_everywhere(errors.DataError, "others", lambda: keras_dist.predict(model, between))


def test_a_reader_caches_the_files_of_each_rank(shared_tmp_path):
    names = [str(number) for number in range(2 * size())]

    def read(mine):
        data = tf.data.Dataset.from_tensor_slices([int(name) for name in mine])
        return data.repeat(BATCH).cache(str(shared_tmp_path / "rows"))

    def read_on(mine):
        return read(mine).map(lambda number: number)

    for _ in range(2):
        part = shard(names, BATCH, reader=read)
        assert set(flat(gathered(part))) == set(range(2 * size()))
    if size() > 1:
        with pytest.raises(errors.DataError, match="rows"):
            shard(names, BATCH, reader=read_on)
        named_by_a_function = cached_in_an_interleave(str(shared_tmp_path / "rows"))
        raised_everywhere(errors.DataError, "cache(", lambda: shard(named_by_a_function, BATCH))


# --- Errors on every rank


tensors = torch.utils.data.TensorDataset


def split_by(seed):
    """The larger part of a data set of torch, split at random."""
    random = torch.Generator().manual_seed(seed)
    part, _ = torch.utils.data.random_split(range(50), [40, 10], random)
    return torch.utils.data.ConcatDataset([part, range(9)])


DIFFERENCES = [
    ("the number of samples", lambda rank: shard(np.arange(50 + rank), 2)),
    ("the number of its elements", lambda rank: shard(numbers(50 + rank), 2)),
    ("the arrays", lambda rank: shard(np.arange(50, dtype=["i8", "f8"][rank > 0]), 2)),
    ("batch_size", lambda rank: shard(np.arange(50), 2 + rank)),
    ("seed", lambda rank: shard(np.arange(50), 2, seed=rank)),
    ("the kind of data", lambda rank: shard(np.arange(50) if rank else numbers(50), 2)),
    ("the seeds of its shuffles", lambda rank: shard(shuffled_before(50, seed=rank), 2)),
    ("the seeds of its shuffles", lambda rank: shard(shuffled_within(50, rank), 2, steps=3)),
    ("the number of samples", lambda rank: shard(range(50 + rank), 2)),
    ("the number of its elements", lambda rank: shard(lambda: iter(range(50 + rank)), 2)),
    ("shuffle", lambda rank: shard(range(50), 2, shuffle="global" if rank else True)),
    ("some of its rows", lambda rank: shard((np.arange(50), np.arange(50.0) * (-1) ** rank), 2)),
    ("the data in memory", lambda rank: shard(split_by(rank), 2)),
    ("the data in memory", lambda rank: shard(tensors(torch.arange(50) - rank), 2)),
    ("the number of files", lambda rank: shard(["a", "b", "c", "d"] + ["e"] * rank)),
    ("the digest", lambda rank: shard(["a", "b", "c", f"{min(rank, 1)}"])),
]


def test_a_difference_between_ranks_is_refused():
    rank = keras_dist.rank()
    if size() == 1:
        for _, call in DIFFERENCES:
            call(0)
        assert len(shard(shuffled_before(50, seed=1), 2)) == 25
        assert len(shard(shuffled_before(50), 2)) == 25
        return
    tf.random.set_seed(None)
    for label, call in DIFFERENCES:
        texts = raised_everywhere(errors.MismatchError, label, lambda call=call: call(rank))
        assert len(set(texts)) == 1
        assert texts[0].startswith(f"[rank 1 of {size()}]")
    raised_everywhere(errors.DataError, "without a seed", lambda: shard(shuffled_before(50), 2))
    tf.random.set_seed(rank)
    raised_everywhere(
        errors.MismatchError,
        "the seeds of its shuffles",
        lambda: shard(shuffled_before(50, seed=1), 2),
    )


def test_trouble_on_one_rank_is_told_on_all():
    last = size() - 1

    def broken(names):
        if keras_dist.rank() == last:
            raise OSError("disk gone")
        return reader(names)

    expected = OSError if keras_dist.rank() == last else errors.DataError
    with pytest.raises(expected, match="disk gone") as caught:
        shard(["a"] * size(), 2, reader=broken, steps=1)
    if expected is errors.DataError:
        assert str(caught.value).startswith(f"[rank {last} of {size()}] Expected data that can")
    keras_dist.barrier()
