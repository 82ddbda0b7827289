"""Sharded tf.data pipelines of samples, batches and files, for any number of ranks."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

from keras_dist import errors
from keras_dist.data.files import source_of_files
from keras_dist.data.record_files import tfrecord
from keras_dist.data.shard_options import ShardOptions
from keras_dist.data.tf_dataset import TfSource


def numbers(count):
    return tf.data.Dataset.range(count)


def options_of(rank, size, arguments):
    return ShardOptions(**arguments, rank=rank, size=size)


def parts_of(data, size, **arguments):
    """The shards of the ranks of a job; a function makes a pipeline for each, as in processes."""
    made = [data() if callable(data) else data for _ in range(size)]
    sources = [TfSource(one, options_of(rank, size, arguments)) for rank, one in enumerate(made)]
    return [source.part([other.held for other in sources]) for source in sources]


def epoch_of(part):
    """The samples of one epoch by batch; checks the cardinality."""
    batches = [batch.tolist() for batch in part.as_numpy_iterator()]
    assert len(batches) == int(part.cardinality())
    return batches


def sizes_of(part):
    return [len(batch) for batch in epoch_of(part)]


def flat(epochs):
    return sorted(number for epoch in epochs for batch in epoch for number in batch)


# --- Samples


@pytest.mark.parametrize("remainder", ["uneven", "pad"])
@pytest.mark.parametrize("batched", [False, True])
def test_remainders_of_nested_sparse_and_ragged_rows(batched, remainder):
    count, size, repeated = (14, 4, [8, 9]) if batched else (9, 2, [5])
    ragged = tf.ragged.constant([[i] * (i % 3) for i in range(count)])
    rows = ({"r": ragged, "s": tf.sparse.from_dense(np.eye(count))}, np.arange(count))
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    if batched:
        parts = parts_of(dataset.batch(2), size, remainder=remainder)
    else:
        parts = parts_of(dataset, size, batch_size=2, remainder=remainder, shuffle=False)
    taken = []
    for batch, labels in itertools.chain(*parts):
        taken += labels.numpy().tolist()
        assert batch["r"].to_list() == [[n] * (n % 3) for n in labels.numpy()]
        dense = tf.sparse.to_dense(tf.sparse.reorder(batch["s"])).numpy()
        np.testing.assert_array_equal(dense, np.eye(count)[labels])
    assert sorted(taken) == sorted([*range(count), *(repeated if remainder == "pad" else [])])


def test_the_shuffle_buffer_fits_into_memory():
    from keras_dist.data import tf_pipelines

    image = tf.TensorSpec((512, 512, 4), tf.float32)
    assert tf_pipelines._buffer_count((image, tf.TensorSpec((), tf.int64))) == 63
    assert tf_pipelines._buffer_count(tf.TensorSpec((2,), tf.float32)) == 65536
    assert tf_pipelines._buffer_count(tf.TensorSpec(None, tf.string)) == 1024


def test_the_shuffle_buffer_can_be_set():
    [part] = parts_of(numbers(9), 1, batch_size=3, shuffle_buffer=1)
    assert epoch_of(part) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


# --- Batches


def test_fewer_batches_than_ranks_share_their_rows():
    epochs = [epoch_of(part) for part in parts_of(numbers(9).batch(6), 4)]
    assert flat(epochs) == list(range(9))
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[2], [2], [2], [3]]
    padded = [epoch_of(part) for part in parts_of(numbers(9).batch(6), 3, remainder="pad")]
    assert [[len(batch) for batch in epoch] for epoch in padded] == [[6], [3], [6]]


@pytest.mark.parametrize("remainder", ["uneven", "pad", "drop"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_seeded_shuffle_upstream_stays_in_step_over_epochs(remainder, batched):
    """A rank that read its pipeline more often than the others would get another order."""

    def make():
        dataset = numbers(22).shuffle(22, seed=5)
        return dataset.batch(2) if batched else dataset

    parts = parts_of(make, 4, remainder=remainder, batch_size=None if batched else 2)
    for _ in range(3):
        samples = flat([epoch_of(part) for part in parts])
        if remainder == "pad":
            assert set(samples) == set(range(22))
        else:
            assert len(set(samples)) == len(samples)
        assert remainder != "uneven" or samples == list(range(22))


# --- Steps


@pytest.mark.parametrize("length", ["known", "unknown", "endless"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_steps_end_an_epoch(length, batch_size):
    dataset = numbers(40)
    if length == "unknown":
        dataset = dataset.filter(lambda _: True)
    elif length == "endless":
        dataset = dataset.repeat()
    dataset = dataset.batch(3) if batch_size is None else dataset
    for part in parts_of(dataset, 2, batch_size=batch_size, steps=4):
        assert [sizes_of(part) for _ in range(2)] == [[3, 3, 3, 3]] * 2


def test_data_that_ends_before_its_steps_says_so():
    dataset = numbers(20).filter(lambda _: True)
    for batched, batch_size in ((dataset, 3), (dataset.batch(3), None)):
        for part in parts_of(batched, 2, batch_size=batch_size, steps=5):
            with pytest.raises(tf.errors.InvalidArgumentError, match="Received: data that ended"):
                epoch_of(part)


# --- Orders


def racing_map(dataset):
    return dataset.map(lambda x: x, num_parallel_calls=2, deterministic=False)


def racing_interleave(dataset):
    return dataset.interleave(numbers, num_parallel_calls=2, deterministic=False)


def interleave(function):
    return lambda dataset: dataset.interleave(function, num_parallel_calls=2)


def random(**options):
    return tf.random.uniform((), **options)


def random_index(dataset):
    def scan(seed, n):
        seed = tf.cond(seed[0] < 0, lambda: tf.random.uniform((2,), 0, 99, tf.int64), lambda: seed)
        return seed, tf.random.experimental.index_shuffle(n, seed, 19)

    return dataset.scan(tf.fill((2,), np.int64(-1)), scan)


# How a data set is changed, and whether its order is its own.
ORDERS = {
    "shuffle": (lambda dataset: dataset.shuffle(5), True),
    "shuffle within interleave": (interleave(lambda n: numbers(n).shuffle(3)), True),
    "random": (lambda dataset: tf.data.Dataset.zip(dataset, tf.data.Dataset.random()), True),
    "sample": (lambda dataset: tf.data.Dataset.sample_from_datasets([dataset, dataset]), True),
    "shuffle within a function": (interleave(tf.function(lambda n: numbers(n).shuffle(3))), True),
    "index": (random_index, True),
    "filter": (lambda dataset: dataset.filter(lambda n: random() < 0.9), True),
    "racing map": (racing_map, True),
    "racing interleave": (racing_interleave, True),
    "racing map within interleave": (interleave(lambda n: racing_map(numbers(n))), True),
    "files": (lambda _: tf.data.Dataset.list_files("/etc/*"), True),
    "sorted files": (lambda _: tf.data.Dataset.list_files("/etc/*", shuffle=False), False),
    "seed": (lambda dataset: dataset.shuffle(5, seed=1), False),
    "map": (lambda dataset: dataset.map(lambda x: x, num_parallel_calls=2), False),
    "seeded index beside noise": (
        lambda dataset: dataset.map(
            lambda n: (tf.random.experimental.index_shuffle(n, (1, 2), 19), random())
        ),
        False,
    ),
    "noise": (lambda dataset: dataset.map(lambda n: n + random(maxval=2, dtype=n.dtype)), False),
    "seeded filter": (lambda dataset: dataset.filter(lambda n: random(seed=1) < 0.9), False),
    "seed within interleave": (interleave(lambda n: numbers(n).shuffle(3, seed=2)), False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_its_own_is_refused(name):
    tf.random.set_seed(None)
    change, is_own = ORDERS[name]
    dataset = change(numbers(20)).map(lambda *x: x[0]).prefetch(2)
    with (
        pytest.raises(errors.DataError, match="before it is shuffled") if is_own else nullcontext()
    ):
        TfSource(dataset, options_of(0, 2, {"batch_size": 2, "steps": 1}))
    TfSource(dataset, options_of(0, 1, {"batch_size": 2, "steps": 1}))


def test_a_pipeline_that_may_be_unordered_is_ordered():
    options = tf.data.Options()
    options.deterministic = False
    [part, _] = parts_of(numbers(9).with_options(options), 2, batch_size=2)
    assert part.options().deterministic is True


# --- Files


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes files of the given numbers of lines, numbered across files."""

    def write_files(*lengths):
        numbers = iter(range(sum(lengths)))
        paths = [tmp_path / f"{index}.txt" for index in range(len(lengths))]
        for path, length in zip(paths, lengths, strict=True):
            path.write_text("".join(f"{next(numbers)}\n" for _ in range(length)))
        return paths

    return write_files


@pytest.mark.parametrize("lengths", [(20, 9, 8), (40,)])
def test_with_steps_nothing_is_counted(lengths, write):
    reads = []

    def counting_reader(names):
        def noted(line):
            reads.append(line)
            return line

        dataset = tf.data.TextLineDataset(names)
        return dataset.map(lambda line: tf.numpy_function(noted, [line], tf.string))

    sources = [
        source_of_files(
            write(*lengths),
            options_of(rank, 2, {"batch_size": 2, "reader": counting_reader, "steps": 4}),
        )
        for rank in range(2)
    ]
    assert not reads
    for source in sources:
        part = source.part([other.held for other in sources])
        assert [len(batch) for batch in part.as_numpy_iterator()] == [2] * 4


def test_a_known_number_of_elements_is_not_counted(write):
    def known(names):
        dataset = tf.data.Dataset.from_tensor_slices(names)
        return dataset.map(lambda name: tf.py_function(pytest.fail, [name], tf.string))

    source = source_of_files(write(1, 1, 1), options_of(0, 2, {"reader": known}))
    assert source.held[0] == 2


def test_without_a_reader_each_rank_has_its_names(write):
    paths = write(1, 1, 1, 1, 1)
    parts = [source_of_files(paths, options_of(rank, 2, {})).part([]) for rank in range(2)]
    assert parts == [[str(path) for path in paths[rank::2]] for rank in range(2)]


def test_facts_distinguish_files_and_their_order():
    def facts(*names):
        return [f.value for f in source_of_files(names, options_of(0, 2, {})).facts]

    assert facts("/one/a", "/one/b") == facts("/two/a", "/two/b")
    assert facts("a", "b") != facts("b", "a")
    assert facts("a", "b") != facts("a", "b", "c")


def test_a_file_of_records_that_is_listed_twice_is_read_twice(tmp_path):
    path = str(tmp_path / "0.tfrecord")
    with tf.io.TFRecordWriter(path) as file:
        for number in range(3):
            file.write(str(number).encode())
    for names in ([path, path], [path]):
        part = tfrecord(names, tf.strings.to_number, batch_size=2, shuffle=False)
        assert flat([epoch_of(part)]) == sorted([0, 1, 2] * len(names))
