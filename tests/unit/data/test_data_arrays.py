"""Sharded arrays: any number of ranks, in the order in which Keras requests batches."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.data.array_dataset import ArrayDataset
from keras_dist.data.arrays import ArraySource
from keras_dist.data.shard_options import ShardOptions
from keras_dist.data.tf_pipelines import pipeline_of

FORMS = [ArrayDataset, pipeline_of]


def parts_of(data, size, form=ArrayDataset, **arguments):
    """Returns the data of each rank of a job, as one or the other kind of data set."""
    return [
        form(ArraySource(data, ShardOptions(**arguments, rank=rank, size=size)).batches)
        for rank in range(size)
    ]


def epoch_of(part):
    """Returns the samples of one epoch, by batch."""
    batches = part if isinstance(part, ArrayDataset) else part.as_numpy_iterator()
    return [batch.tolist() for batch in batches]


def test_two_iterations_at_once_do_not_disturb_each_other():
    [part] = parts_of(np.arange(20), 1, pipeline_of, batch_size=3)
    once = epoch_of(part)
    both = zip(part.as_numpy_iterator(), part.as_numpy_iterator(), strict=True)
    batches = list(zip(*both, strict=True))
    for epoch in batches:
        assert sorted(np.concatenate(epoch)) == list(range(20))
    assert once != [batch.tolist() for batch in batches[0]]


@pytest.mark.parametrize("form", FORMS)
def test_data_is_released_with_its_last_reader(form):
    batches = ArraySource(np.arange(20), ShardOptions(batch_size=3)).batches
    data = weakref.ref(batches)
    part = form(batches)
    if form is pipeline_of:
        pairs = tf.data.Dataset.zip((part, part.take(3).prefetch(1)))
        summed = tf.function(lambda part: part.reduce(0, lambda one, _: one + 1))
        assert int(summed(pairs)) == 3
        part = iter(pairs)
        del pairs, summed
        assert next(part)[0].shape == (3,)
    del batches
    gc.collect()
    assert data() is not None
    del part
    gc.collect()
    assert data() is None


def test_batch_size_is_32_unless_given():
    [part] = parts_of(np.arange(100), 1)
    assert [len(batch) for batch in part] == [32, 32, 32, 4]


def test_a_dataset_is_indexed_like_a_list():
    [part] = parts_of(np.arange(10), 1, batch_size=4, shuffle=False)
    assert part[2].tolist() == part[-1].tolist() == [8, 9]
    with pytest.raises(IndexError):
        part[3]


def test_data_on_disk_is_read_batch_by_batch(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(50).reshape(25, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    batch = parts_of(mapped, 2, batch_size=4)[0][0]
    assert type(batch) is np.ndarray
    assert batch.shape == (4, 2)


def test_a_pipeline_has_a_length_and_shapes():
    data = {"x": np.zeros((9, 2), "float16"), "name": np.array(list("abcdefghi"))}
    [part] = parts_of(data, 1, pipeline_of, batch_size=4, remainder="drop", shuffle=False)
    assert int(part.cardinality()) == 2
    assert part.options().autotune.enabled is False
    assert part.element_spec["x"].shape == (4, 2)
    assert part.element_spec["x"].dtype == "float32"  # as Keras converts arrays
    assert [list(batch["name"]) for batch in part.as_numpy_iterator()][1] == [
        *map(str.encode, "efgh")
    ]
    [uneven] = parts_of(data, 1, pipeline_of, batch_size=4)
    assert uneven.element_spec["x"].shape == (None, 2)


def test_batches_keep_their_order_when_keras_requests_another():
    [part], [other] = (parts_of(np.arange(20), 1, batch_size=4) for _ in range(2))
    for each in (part, other):
        each.on_epoch_end()
    expected = epoch_of(other)
    part.on_epoch_begin()
    asked = [part[index].tolist() for index in (3, 0, 4, 1, 2)]
    assert asked == expected
    assert part[0].tolist() == expected[1]
    part.on_epoch_end()
    following = part[0].tolist()
    assert following != expected[0]
    assert following == epoch_of(part)[0]


def test_the_end_of_an_epoch_may_be_said_after_a_loop():
    [part], [other] = (parts_of(np.arange(20), 1, batch_size=4) for _ in range(2))
    assert epoch_of(part) == epoch_of(other)
    part.on_epoch_end()
    assert epoch_of(part) == epoch_of(other)
