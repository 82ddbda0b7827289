"""Sharded lists of files: by name, by file, and by element."""

import numpy as np
import pytest
import tensorflow as tf

from keras_dist import errors
from keras_dist.data.files import are_files, source_of_files
from keras_dist.data.record_files import tfrecord
from keras_dist.data.shard_options import ShardOptions


def options_of(rank, size, arguments):
    return ShardOptions(**arguments, rank=rank, size=size, where=f"[rank {rank} of {size}]")


def parts_of(names, size, **arguments):
    """Returns the data of each rank of a job."""
    sources = [source_of_files(names, options_of(rank, size, arguments)) for rank in range(size)]
    return [source.part([other.held for other in sources]) for source in sources]


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


def reader(names):
    return tf.data.TextLineDataset(names).map(tf.strings.to_number)


def epoch_of(part):
    batches = [batch.astype(int).tolist() for batch in part.as_numpy_iterator()]
    assert len(batches) == int(part.cardinality())
    return batches


def flat(epochs):
    return sorted(number for epoch in epochs for batch in epoch for number in batch)


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
    parts = parts_of(paths, 2)
    assert parts == [[str(path) for path in paths[rank::2]] for rank in range(2)]


def test_what_counts_as_files(tmp_path):
    assert are_files([tmp_path, "a"])
    assert are_files(("a", "b"))
    assert not are_files([])
    assert not are_files("a")
    assert not are_files(["a", np.arange(3)])
    assert not are_files(np.array(["a"]))


def test_facts_distinguish_files_and_their_order():
    def facts(*names):
        return [f.value for f in source_of_files(names, options_of(0, 2, {})).facts]

    assert facts("/one/a", "/one/b") == facts("/two/a", "/two/b")
    assert facts("a", "b") != facts("b", "a")
    assert facts("a", "b") != facts("a", "b", "c")


@pytest.mark.parametrize(
    ("names", "arguments", "error", "culprit"),
    [
        (["a"], {}, errors.DataError, "Pass reader"),
        (["a", "b"], {"batch_size": 2}, errors.ArgumentError, "Pass reader"),
        (["a", "b"], {"shuffle": True}, errors.ArgumentError, "Pass reader"),
        (["a", "b"], {"reader": list}, errors.ArgumentTypeError, "reader to return"),
        (["a", "b"], {"reader": "tfrecord"}, errors.ArgumentTypeError, "reader to be"),
        (
            ["a", "b"],
            {"reader": lambda names: tf.data.Dataset.range(9).repeat()},
            errors.DataError,
            "no end",
        ),
        (
            ["a"],
            {"reader": lambda names: tf.data.Dataset.range(9).shuffle(9)},
            errors.DataError,
            "same order",
        ),
    ],
)
def test_bad_input_is_refused_on_every_rank(names, arguments, error, culprit):
    tf.random.set_seed(None)
    for rank in range(2):
        with pytest.raises(error, match=rf"^\[rank {rank} of 2\] Expected .*") as caught:
            source_of_files(names, options_of(rank, 2, arguments))
        assert culprit in str(caught.value)


def test_a_file_of_records_that_is_listed_twice_is_read_twice(tmp_path):
    path = str(tmp_path / "0.tfrecord")
    with tf.io.TFRecordWriter(path) as file:
        for number in range(3):
            file.write(str(number).encode())
    for names in ([path, path], [path]):
        part = tfrecord(names, tf.strings.to_number, batch_size=2, shuffle=False)
        assert flat([epoch_of(part)]) == sorted([0, 1, 2] * len(names))
