"""Sharded arrays: any number of ranks, in the order in which Keras requests batches."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist import errors
from keras_dist.data import epochs
from keras_dist.data.array_dataset import ArrayDataset
from keras_dist.data.arrays import ArraySource
from keras_dist.data.shard_options import ShardOptions
from keras_dist.data.tf_arrays import pipeline_of

FORMS = [ArrayDataset, pipeline_of]


def parts_of(data, size, form=ArrayDataset, **arguments):
    """Returns the data of each rank of a job, as one or the other kind of data set."""
    return [
        form(ArraySource(data, ShardOptions(**arguments, rank=rank, size=size, where="")).batches)
        for rank in range(size)
    ]


def epoch_of(part):
    """Returns the samples of one epoch, by batch."""
    batches = part if isinstance(part, ArrayDataset) else part.as_numpy_iterator()
    return [batch.tolist() for batch in batches]


def next_epoch(part):
    if isinstance(part, ArrayDataset):
        part.on_epoch_end()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_cover_all_samples(size, shuffle, form):
    parts = parts_of(np.arange(41), size, form, batch_size=4, shuffle=shuffle)
    assert {len(part) for part in parts} == {-(-(41 // size) // 4)}
    for _ in range(2):
        samples = [number for part in parts for batch in epoch_of(part) for number in batch]
        assert sorted(samples) == list(range(41))
        for part in parts:
            next_epoch(part)


@pytest.mark.parametrize("form", FORMS)
def test_arrays_have_native_byte_order(form):
    data = {"x": np.arange(4, dtype=">i8"), "y": np.arange(4, dtype=">f4")}
    [part] = parts_of(data, 1, form, batch_size=4, shuffle=False)
    batch = part[0] if form is ArrayDataset else next(part.as_numpy_iterator())
    assert batch["x"].dtype == np.int64 and batch["y"].dtype == np.float32
    assert batch["x"].tolist() == batch["y"].tolist() == [0, 1, 2, 3]


def test_both_forms_have_the_same_orders():
    [one], [other] = (parts_of(np.arange(20), 1, form, batch_size=3) for form in FORMS)
    for _ in range(3):
        assert epoch_of(one) == epoch_of(other)
        next_epoch(one)


@pytest.mark.parametrize("form", FORMS)
def test_an_epoch_can_be_resumed(form):
    def make():
        return [parts_of(np.arange(20), 1, form, batch_size=3, seed=seed)[0] for seed in (0, 0, 1)]

    earlier = one, _, third = make()
    for part in (one, one, third):
        epoch_of(part)
        next_epoch(part)
    numbers = epochs.numbers()
    expected = [epoch_of(part) for part in earlier]
    later = make()  # while the earlier data sets are alive
    assert [epoch_of(part) for part in later] != expected
    epochs.restore(numbers)
    assert [epoch_of(part) for part in later] == expected


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


@pytest.mark.parametrize("form", FORMS)
def test_nested_arrays_stay_together(form):
    numbers = np.arange(10)
    data = ([numbers, {"half": numbers / 2}], numbers.astype("int8"), np.arange(20).reshape(10, 2))
    [_, part] = parts_of(data, 2, form, batch_size=3)
    for (whole, inner), small, pairs in part:
        whole, small = np.asarray(whole), np.asarray(small)
        np.testing.assert_array_equal(inner["half"], whole / 2)
        np.testing.assert_array_equal(small, whole)
        np.testing.assert_array_equal(pairs[:, 0], whole * 2)
        assert small.dtype == np.int8
        assert set(whole % 2) == {1}


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


@pytest.mark.parametrize("form", FORMS)
def test_steps_end_an_epoch_early(form):
    parts = parts_of(np.arange(40), 2, form, batch_size=4, steps=3)
    seen = set()
    for _ in range(8):
        epochs = [epoch_of(part) for part in parts]
        assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 4]] * 2
        seen |= {number for epoch in epochs for batch in epoch for number in batch}
        for part in parts:
            next_epoch(part)
    assert seen == set(range(40))


def test_a_pipeline_has_a_length_and_shapes():
    data = {"x": np.zeros((9, 2), "float16"), "name": np.array(list("abcdefghi"))}
    [part] = parts_of(data, 1, pipeline_of, batch_size=4, remainder="drop", shuffle=False)
    assert int(part.cardinality()) == 2
    assert part.options().autotune.enabled is False
    assert part.element_spec["x"].shape == (4, 2)
    assert part.element_spec["x"].dtype == "float16"
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


# --- In Keras


def recorded(seen):
    """Returns a model that appends the samples of every batch to `seen`."""

    class Model(keras.Sequential):
        def train_step(self, data):
            seen.append(keras.ops.convert_to_numpy(data[0])[:, 0].astype(int).tolist())
            return super().train_step(data)

        def test_step(self, data):
            seen.append(keras.ops.convert_to_numpy(data[0])[:, 0].astype(int).tolist())
            return super().test_step(data)

    model = Model([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def numbered(count):
    numbers = np.arange(count, dtype="float32").reshape(count, 1)
    return numbers, numbers / count


def flat(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_fit_sees_every_sample_once_per_epoch_in_a_new_order(validated, form):
    def run():
        seen = []
        [train] = parts_of(numbered(22), 1, form, batch_size=5)
        validation = parts_of(numbered(7), 1, form, batch_size=3)[0] if validated else None
        model = recorded(seen)
        epochs = []
        model.fit(
            train,
            epochs=3,
            verbose=0,
            shuffle=form is ArrayDataset,
            validation_data=validation,
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs: (epochs.append(list(seen)), seen.clear())
                )
            ],
        )
        return epochs

    epochs = run()
    for batches in epochs:
        assert [len(batch) for batch in batches[:5]] == [5, 5, 5, 5, 2]
        assert sorted(flat(batches[:5])) == list(range(22))
        assert sorted(flat(batches[5:])) == (list(range(7)) if validated else [])
    assert len({str(batches) for batches in epochs}) == 3
    assert run() == epochs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_evaluate_sees_every_sample_once(shuffle, form):
    seen = []
    [part] = parts_of(numbered(13), 1, form, batch_size=5, shuffle=shuffle)
    recorded(seen).evaluate(part, verbose=0)
    assert sorted(flat(seen)) == list(range(13))
    assert (flat(seen) == list(range(13))) is not shuffle


@pytest.mark.parametrize("form", FORMS)
def test_unshuffled_batches_come_in_the_order_of_the_data(form):
    seen = []
    [part] = parts_of(numbered(13), 1, form, batch_size=5, shuffle=False)
    recorded(seen).fit(part, epochs=2, verbose=0, shuffle=form is ArrayDataset)
    assert flat(seen) == 2 * list(range(13))


@pytest.mark.parametrize("form", FORMS)
def test_fit_in_a_graph_takes_class_weights(form):
    x, y = np.ones((10, 3), "float32"), np.arange(10) % 2
    [part] = parts_of((x, y), 1, form, batch_size=4)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(part, epochs=2, class_weight={0: 1.0, 1: 2.0}, verbose=0, shuffle=False)
    assert np.isfinite(history.history["loss"]).all()
    assert model.predict(part, verbose=0).shape == (10, 2)


# --- Bad input


@pytest.mark.parametrize(
    ("data", "arguments", "error", "culprit"),
    [
        (np.arange(3), {}, errors.DataError, "at least 4 samples"),
        ((np.arange(8), np.arange(9)), {}, errors.DataError, "data[0] 8, data[1] 9"),
        ({"x": np.arange(8), "y": np.ones(())}, {}, errors.DataError, "data['y'] a scalar"),
        ([], {}, errors.DataError, "no array"),
        ((np.arange(8), [1, 2]), {}, errors.ArgumentTypeError, "data[1][0]"),
        (np.arange(8), {"steps": 2}, errors.DataError, "steps=2"),
        (np.arange(8), {"reader": len}, errors.ArgumentError, "reader"),
        (np.arange(8), {"shuffle_buffer": 9}, errors.ArgumentError, "shuffle_buffer=9"),
    ],
)
def test_bad_input_is_refused_on_every_rank(data, arguments, error, culprit):
    for rank in range(4):
        options = ShardOptions(**arguments, rank=rank, size=4, where=f"[rank {rank} of 4]")
        with pytest.raises(error, match=rf"^\[rank {rank} of 4\] Expected .* Received: ") as caught:
            ArraySource(data, options)
        assert culprit in str(caught.value)
