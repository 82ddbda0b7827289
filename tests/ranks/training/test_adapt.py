"""`adapt` equals `layer.adapt` in one process on the data of all ranks."""

import keras
import numpy as np
import pytest
from small_training import agreed

import keras_dist
from keras_dist import errors

# The code is the same on every backend: on others run what docs/backends.md shows.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")

layers = keras.layers
tf = pytest.importorskip("tensorflow")


def is_last():
    """Whether this rank has no data, if there are others."""
    return keras_dist.rank() == keras_dist.size() - 1 > 0


def share_of(rows):
    """Uneven shares of rows: the last rank has none, and rank 0 has more than the others."""
    size, rank = keras_dist.size(), keras_dist.rank()
    ends = [0] + [len(rows) * (rank + 2) // (size + 1) for rank in range(size - 2)]
    ends += [len(rows)] * min(size, 2)
    return rows[ends[rank] : ends[rank + 1]]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(1000, 3, shape).astype("float32")


def moments_of(layer):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in (layer.mean, layer.variance)]


@on_each_backend
@pytest.mark.parity("`adapt`: mean and variance of all ranks")
@pytest.mark.parametrize("axis", [-1, None, (1, 2), 1])
def test_mean_and_variance_are_those_of_one_process(axis):
    rows = numbers(31, 4, 2)
    layer, alone = layers.Normalization(axis=axis), layers.Normalization(axis=axis)
    keras_dist.adapt(layer, share_of(rows))
    alone.adapt(rows.astype("float64"))
    for mine, expected in zip(moments_of(layer), moments_of(alone), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)
        assert mine.shape == expected.shape
    assert agreed([value.tobytes() for value in moments_of(layer)])


def batches(rows):
    return (rows[at : at + 5] for at in range(0, len(rows), 5))


class Batches(keras.utils.PyDataset):
    def __init__(self, rows):
        super().__init__()
        self.batches = list(batches(rows))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        return self.batches[number], np.zeros(len(self.batches[number]))


KINDS = {
    "PyDataset": Batches,
    "array": lambda rows: rows,
    "tensor": keras.ops.convert_to_tensor,
    "generator": batches,
    "list of batches": lambda rows: list(batches(rows)),
    "tf.data": lambda rows: tf.data.Dataset.from_tensor_slices(rows).batch(5),
    "tf.data with targets": lambda rows: tf.data.Dataset.from_tensor_slices((rows, rows)).batch(5),
    "tf.data of samples": tf.data.Dataset.from_tensor_slices,
    "tf.data of numbers": lambda rows: tf.data.Dataset.from_tensor_slices(rows.ravel()),
    "None or an array": lambda rows: rows if len(rows) else None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_normalization_takes_what_its_adapt_takes(kind):
    rows, is_whole = numbers(23, 3), kind == "tf.data of numbers"
    layer = layers.Normalization(axis=None if is_whole else -1)
    keras_dist.adapt(layer, KINDS[kind](share_of(rows)))
    mean, variance = moments_of(layer)
    along, exact = None if is_whole else 0, rows.astype("float64")
    np.testing.assert_allclose(mean.ravel(), exact.mean(along), rtol=1e-6)
    np.testing.assert_allclose(variance.ravel(), exact.var(along), rtol=1e-5)
    assert layer.get_build_config() == {"input_shape": (None,) if is_whole else (None, 3)}


def test_a_layer_adapts_within_a_model_and_again():
    rows = numbers(12, 3)
    layer = layers.Normalization()
    model = keras.Sequential([keras.Input((3,)), keras.Sequential([layer])])
    for data in (rows + 7, rows):
        keras_dist.adapt(layer, share_of(data))
    expected = (rows - rows.mean(0)) / rows.std(0)
    np.testing.assert_allclose(model.predict(rows, verbose=0), expected, atol=1e-3)


@on_each_backend
@pytest.mark.parametrize("count", [1, 7, 130, 1050, 4321])
@pytest.mark.parity("`adapt`: bin boundaries of all ranks")
def test_bins_are_those_of_one_process_on_the_joined_array(count):
    values = np.round(np.random.default_rng(1).normal(0, 3, count), 1).astype("float32")
    layer, alone = layers.Discretization(num_bins=7), layers.Discretization(num_bins=7)
    keras_dist.adapt(layer, share_of(values))
    alone.adapt(values)
    assert list(layer.bin_boundaries) == list(alone.bin_boundaries)
    assert agreed(list(layer.bin_boundaries))


@pytest.mark.parametrize("steps", [None, 2])
def test_bins_of_batches_are_those_of_joined_batches(steps):
    size = keras_dist.size()
    shares = [numbers(3 + rank, 70, seed=rank) for rank in range(size)]  # rank 0 has 3 batches
    layer, alone = layers.Discretization(num_bins=5), layers.Discretization(num_bins=5)
    keras_dist.adapt(layer, iter(shares[keras_dist.rank()]), steps=steps)
    longest = steps or len(shares[-1])
    joined = [[s[at] for s in shares if at < len(s)] for at in range(longest)]
    for parts in joined:
        alone.update_state(np.concatenate(parts))
    alone.finalize_state()
    assert list(layer.bin_boundaries) == list(alone.bin_boundaries)


WORDS = "b a b c a d e f f ü ü g h i j a z y".split()
TEXTS = ["A b, c a", "b c", "a", "d d d", "e f g", "a b", "zz"]

LOOKUPS = {
    "ties": (lambda: layers.StringLookup(), WORDS),
    "max_tokens": (lambda: layers.StringLookup(max_tokens=5, mask_token="b"), WORDS),
    "multi_hot": (lambda: layers.StringLookup(output_mode="multi_hot"), WORDS),
    "tf_idf": (
        lambda: layers.StringLookup(output_mode="tf_idf", max_tokens=6, pad_to_max_tokens=True),
        [WORDS[at : at + 3] for at in range(0, 18, 3)],
    ),
    "invert": (lambda: layers.StringLookup(invert=True), WORDS),
    "integers": (lambda: layers.IntegerLookup(num_oov_indices=2), [5, 1, 5, 7, 1, 900, 3, -4]),
    "text": (lambda: layers.TextVectorization(max_tokens=8), TEXTS),
    "ngrams": (lambda: layers.TextVectorization(ngrams=2, output_mode="count"), TEXTS),
    "text, tf_idf": (lambda: layers.TextVectorization(output_mode="tf_idf"), TEXTS),
}


def weights_of(layer):
    store = {}
    layer.save_own_variables(store)
    return [np.asarray(value).tobytes() for value in store.values()]


@on_each_backend
@pytest.mark.parity("`adapt`: vocabularies of all ranks")
@pytest.mark.parametrize("name", LOOKUPS)
def test_vocabularies_are_those_of_one_process(name):
    make, data = LOOKUPS[name]
    layer, alone = make(), make()
    keras_dist.adapt(layer, share_of(np.array(data)))
    alone.adapt(np.array(data))
    assert layer.get_vocabulary() == alone.get_vocabulary()
    assert weights_of(layer) == weights_of(alone)
    assert agreed([*map(str, layer.get_vocabulary()), *weights_of(layer)])


@pytest.mark.parametrize("kind", ["list", "tf.data", "generator", "None"])
def test_lookups_take_what_their_adapt_takes(kind):
    share = share_of(WORDS)
    kinds = {
        "list": lambda: share,
        "tf.data": lambda: tf.data.Dataset.from_tensor_slices(np.array(share, "U")).batch(4),
        "generator": lambda: (np.array(share[at : at + 3]) for at in range(0, len(share), 3)),
        "None": lambda: None if is_last() else share,
    }
    layer, alone = layers.StringLookup(), layers.StringLookup()
    if kind == "generator":
        try:
            alone.adapt(np.array(WORDS[at : at + 3]) for at in range(0, len(WORDS), 3))
        except ValueError:
            pytest.skip("this version of Keras takes no generator")
    keras_dist.adapt(layer, kinds[kind]())
    alone.adapt(WORDS)
    assert layer.get_vocabulary() == alone.get_vocabulary()


def test_a_feature_space_adapts_each_of_its_features():
    space, alone = (
        keras.utils.FeatureSpace(
            {"age": "float_normalized", "city": "string_categorical", "size": "float_discretized"},
            output_mode="concat",
        )
        for _ in range(2)
    )
    table = {
        "age": numbers(12).tolist(),
        "city": list("aabbbcdefgha"),
        "size": numbers(12, seed=1).tolist(),
    }
    rank, size = keras_dist.rank(), keras_dist.size()
    share = {name: column[rank::size] for name, column in table.items()}
    keras_dist.adapt(space, tf.data.Dataset.from_tensor_slices(share))
    alone.adapt(tf.data.Dataset.from_tensor_slices(table).batch(size))
    features = {name: column[:3] for name, column in table.items()}
    received, expected = (np.array(each(dict(features))) for each in (space, alone))
    np.testing.assert_allclose(received, expected, atol=1e-4)


class Own(layers.Normalization):
    def adapt(self, data):
        super().adapt(data)


REFUSED = {
    "an adapt of its own": (Own, lambda: np.ones((2, 2)), "with an adapt of its own"),
    "constants": (
        lambda: layers.Normalization(mean=0.0, variance=1.0),
        lambda: np.ones((2, 2)),
        "without mean and variance",
    ),
    "boundaries": (
        lambda: layers.Discretization(bin_boundaries=[1.0]),
        lambda: np.ones(3),
        "with num_bins",
    ),
    "masked values": (
        layers.Normalization,
        lambda: np.ma.masked_less(np.ones((2, 2)), 2 - keras_dist.rank()),
        "masked values",
    ),
    "vocabulary": (
        lambda: layers.StringLookup(vocabulary=["a"]),
        lambda: ["a"],
        "Cannot adapt layer",
    ),
    "no numbers": (layers.Normalization, lambda: None, "none on any rank"),
    "no values": (lambda: layers.Discretization(num_bins=2), list, "none on any rank"),
    "no tokens": (layers.StringLookup, list, "tokens on a rank"),
    "other sizes": (
        layers.Normalization,
        lambda: np.ones((2, 3 + is_last())) if keras_dist.size() > 1 else iter([1.0]),
        "equal sizes of the axes|batches of data",
    ),
    "batches of other sizes": (
        layers.Normalization,
        lambda: iter([np.ones((2, 3)), np.ones((2, 1))]),
        "moments of shapes",
    ),
    "text for numbers on one rank": (
        lambda: layers.Discretization(num_bins=2),
        lambda: np.array(["x"]) if keras_dist.rank() == 0 else np.ones(1),
        "could not convert",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adapted_is_an_error_on_every_rank(name):
    make, data, message = REFUSED[name]
    with pytest.raises(errors.ArgumentError, match=message):
        keras_dist.adapt(make(), data())
    keras_dist.barrier()
