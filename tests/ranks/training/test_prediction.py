"""`predict` and `gather`: every sample once, in the order of the data set."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist
from keras_dist import errors

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")

BATCH = 4
TOTALS = [1, 3, 9, 17, 24]  # fewer samples than ranks, rests, and full batches

rng = np.random.default_rng(5)
x = rng.standard_normal((24, 3)).astype("float32")


@pytest.fixture(scope="module")
def model():
    """A model with outputs in a dict, one of them nested."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    outputs = {
        "sum": keras.layers.Dense(1)(inputs),
        "pair": [keras.layers.Dense(2)(inputs), keras.layers.Reshape((3, 1))(inputs)],
    }
    return keras.Model(inputs, outputs)


def of_batches(total):
    return tf.data.Dataset.from_tensor_slices((x[:total], x[:total, :1])).batch(BATCH)


class InBatches(keras.utils.PyDataset):
    def __init__(self, total):
        super().__init__()
        self.total = total

    def __len__(self):
        return -(-self.total // BATCH)

    def __getitem__(self, index):
        return (x[: self.total][index * BATCH : (index + 1) * BATCH],)


def generator(total):
    for start in range(0, total, BATCH):
        yield (x[start : min(start + BATCH, total)],)


def loader(total, **options):
    import torch

    return torch.utils.data.DataLoader(torch.as_tensor(x[:total]), BATCH, **options)


WHOLE = {
    "arrays": lambda total: x[:total],
    "tf.data": of_batches,
    "PyDataset": InBatches,
    "generator": generator,
    "a function": lambda total: lambda: generator(total),
}


def check(received, expected):
    assert keras.tree.flatten(received) and type(received) is type(expected)
    keras.tree.assert_same_structure(received, expected)
    for one, other in zip(keras.tree.flatten(received), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    # Batches differ in size, and so do last bits; the ranks agree.
    digests = keras_dist.allgather_object([leaf.tobytes() for leaf in keras.tree.flatten(received)])
    assert all(digest == digests[0] for digest in digests)


@pytest.mark.jobs("tensorflow-2", "jax-2")
@pytest.mark.parity("`predict` of all ranks equals that of one process")
def test_predictions_of_all_kinds_of_data_are_those_of_one_process(model):
    for total in TOTALS:
        expected = model.predict(x[:total], batch_size=BATCH, verbose=0)
        for kind, made in WHOLE.items():
            size = {"batch_size": BATCH} if kind == "arrays" else {}
            check(keras_dist.predict(model, made(total), verbose=0, **size), expected)


def test_predictions_for_a_loader_of_torch(model):
    for total in TOTALS:
        received = keras_dist.predict(model, loader(total), verbose=0)
        check(received, model.predict(x[:total], batch_size=BATCH, verbose=0))
    with pytest.raises(errors.ArgumentError, match="shuffle=False"):  # on all ranks
        keras_dist.predict(model, loader(24, shuffle=True), verbose=0)


def test_steps_limit_the_batches_of_all_ranks_together(model):
    for data in (of_batches(24), InBatches(24), generator(24)):
        received = keras_dist.predict(model, data, steps=3, verbose=0)
        check(received, model.predict(x[: 3 * BATCH], batch_size=BATCH, verbose=0))


def test_only_the_root_holds_the_result(model):
    received = keras_dist.predict(model, x, batch_size=BATCH, root_only=True, verbose=0)
    assert (received is None) == (keras_dist.rank() > 0)
    received = keras_dist.broadcast_object(received)
    check(received, model.predict(x, batch_size=BATCH, verbose=0))


def test_a_failure_of_one_rank_is_raised_on_all(model):
    last = keras_dist.size() - 1
    wrong = x[:, :2] if keras_dist.rank() == last else x
    with pytest.raises(Exception) as caught:
        keras_dist.predict(model, wrong, batch_size=BATCH, verbose=0)
    # Which of the layers fails first, and so the text, is the backend's on the rank that failed.
    if keras_dist.rank() != last:
        assert isinstance(caught.value, errors.DataError)
        assert f"rank {last} of" in str(caught.value)
    else:
        assert not isinstance(caught.value, errors.DataError)


def test_outputs_of_several_shapes_on_one_rank_are_an_error_on_all():
    last = keras_dist.size() - 1
    batches = [np.ones((BATCH, 3), "float32")] * (2 * last + 1) + [np.ones((BATCH, 2), "float32")]
    same = keras.Sequential([keras.Input((None,)), keras.layers.Identity()])
    with pytest.raises(ValueError if keras_dist.rank() == last else errors.DataError):
        keras_dist.predict(same, lambda: iter(batches), verbose=0)


def test_data_without_a_batch_and_a_size_of_batches_are_errors(model):
    with pytest.raises(errors.DataError, match="without a batch"):
        keras_dist.predict(model, x[:0], verbose=0)
    with pytest.raises(errors.ArgumentError, match="batch_size"):
        keras_dist.predict(model, InBatches(8), batch_size=2, verbose=0)


@pytest.mark.parametrize("remainder", ["uneven", "pad", "drop"])
def test_gather_restores_the_order_of_a_shard(remainder):
    size = keras_dist.size()
    total = 3 * size * BATCH + size - 1
    rows = np.arange(total)
    sources = (rows, tf.data.Dataset.from_tensor_slices(rows))
    for source in sources:
        shard = keras_dist.data.shard(source, BATCH, shuffle=False, remainder=remainder)
        mine = np.concatenate([np.asarray(batch) for batch in shard])
        received = keras_dist.gather({"rows": mine}, shard)["rows"].tolist()
        if remainder == "drop":
            assert received == sorted(set(received)) and len(received) > total - size * BATCH
        else:
            assert received == rows.tolist()


@pytest.mark.parametrize("root_only", [False, True])
def test_gather_without_data_interleaves_the_ranks_and_takes_text(root_only):
    rank, size = keras_dist.rank(), keras_dist.size()
    names = np.array([f"name {'x' * n}" for n in range(3 * size + 1)])
    whole = {
        "text": names,
        "bytes": names.astype(bytes).astype(object),
        "numbers": np.arange(3 * size + 1),
    }
    mine = {name: each[rank::size] for name, each in whole.items()}
    found = keras_dist.gather(mine, root_only=root_only)
    if root_only and rank > 0:
        assert found is None
        return
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in whole.items()
    }


@pytest.mark.jobs("tensorflow-2")
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="others have no text tensors")
def test_predict_returns_text():
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"], invert=True, oov_token="?")
    numbers = keras.Input((1,), dtype="int32")
    model = keras.Model(numbers, {"text": lookup(numbers), "number": numbers})
    x = np.arange(9)[:, None] % 3
    expected, found = model.predict(x, verbose=0), keras_dist.predict(model, x, 2, verbose=0)
    assert expected["text"].tolist() == found["text"].tolist()
    assert expected["number"].tolist() == found["number"].tolist()


def test_predictions_for_a_shard(model):
    total = 4 * keras_dist.size() + 1
    rows = np.resize(x, (total, 3))
    shard = keras_dist.data.shard(rows, BATCH, shuffle=False)
    check(keras_dist.predict(model, shard, verbose=0), model.predict(rows, verbose=0))


def test_wrong_numbers_of_rows_are_errors():
    ordered = keras_dist.data.shard(np.arange(8 * keras_dist.size()), BATCH, shuffle=False)
    with pytest.raises(errors.DataError, match="one row for each sample"):
        keras_dist.gather(np.arange(7), ordered)
    if keras_dist.size() > 1:
        with pytest.raises(errors.DataError, match="rows on the ranks"):
            keras_dist.gather(np.arange(3 * keras_dist.rank() + 1))


def test_a_pipeline_of_a_function_is_examined(model, shared_tmp_path):
    def cached():
        batches = tf.data.Dataset.from_tensor_slices(x).batch(BATCH)
        return batches.cache(str(shared_tmp_path / "cache"))

    expected = model.predict(x, verbose=0)
    outputs = keras_dist.predict(model, cached, verbose=0)
    np.testing.assert_allclose(outputs["sum"], expected["sum"], rtol=1e-5, atol=1e-6)

    if keras_dist.size() > 1:
        racing = tf.data.Dataset.from_tensor_slices(x).map(
            lambda row: row, num_parallel_calls=2, deterministic=False
        )
        with pytest.raises(errors.DataError, match="the same order on all ranks"):
            keras_dist.predict(model, lambda: racing.batch(BATCH), verbose=0)
