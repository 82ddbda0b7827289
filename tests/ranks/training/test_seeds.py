"""Random numbers of the ranks after one seed on all of them: what differs, and what is equal.

docs/guide/seeds.md states the same in a table.
"""

import random
import sys
import warnings

import keras
import numpy as np
import pytest

import keras_dist

pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")

BACKEND = keras.config.backend()
SEED = 42


def gathered(value):
    """Returns the bytes of a value on all ranks."""
    return keras_dist.allgather_object(np.array(keras.ops.convert_to_numpy(value)).tobytes())


def differ(value):
    """Returns whether a value differs between all ranks."""
    return len(set(gathered(value))) == keras_dist.size()


def equal(value):
    """Returns whether a value is equal on all ranks."""
    return len(set(gathered(value))) == 1


class Recorded(keras.layers.Layer):
    """Records the differences that another layer makes in training steps."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.seen = layer, []

    def call(self, inputs, training=None):
        outputs = self.layer(inputs, training=training)
        if training:
            self.record(outputs - inputs)
        return outputs

    def record(self, values):
        if BACKEND != "tensorflow":
            self.seen.append(keras.ops.convert_to_numpy(values))
            return
        import tensorflow as tf

        tf.numpy_function(self.seen.append, [values], [])


class Noise(keras.layers.Layer):
    """Adds noise without a seed."""

    def call(self, inputs, training=None):
        return inputs + self.noise(keras.ops.shape(inputs)) if training else inputs

    def noise(self, shape):
        return keras.random.normal(shape)


class OwnGenerator(Noise):
    """Adds noise of a generator that the layer holds."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(3)

    def noise(self, shape):
        return keras.random.normal(shape, seed=self.generator)


class FrameworkNoise(Noise):
    """Adds noise of TensorFlow or torch."""

    def noise(self, shape):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            return tf.random.normal(shape)
        import torch

        return torch.nn.functional.dropout(torch.randn(shape))


LAYERS = {
    "`Dropout`": lambda: keras.layers.Dropout(0.5),
    "`Dropout(seed=3)`": lambda: keras.layers.Dropout(0.5, seed=3),
    "`GaussianNoise`": lambda: keras.layers.GaussianNoise(1.0),
    "`GaussianNoise(seed=3)`": lambda: keras.layers.GaussianNoise(1.0, seed=3),
    "`RandomBrightness`": lambda: keras.layers.RandomBrightness(0.5, (0.0, 1.0)),
    "`RandomBrightness(seed=3)`": lambda: keras.layers.RandomBrightness(0.5, (0.0, 1.0), seed=3),
    "a `SeedGenerator` in a layer": OwnGenerator,
}
if BACKEND != "jax":  # Keras refuses generators without a seed in compiled steps of JAX
    LAYERS["`keras.random` in a layer"] = Noise
    LAYERS["the framework's generator in a layer"] = FrameworkNoise


def model_of(*layers, shape=(4, 4, 4)):
    recorded = [Recorded(layer) for layer in layers]
    top = [keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input(shape), *recorded, *top])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", run_eagerly=BACKEND != "tensorflow")
    return model, recorded


def fit(model, *callbacks):
    images = np.full((2, 4, 4, 4), 0.5 + 0.1 * keras_dist.rank(), "float32")
    values = np.ones((2, 1), "float32")
    model.fit(images, values, batch_size=1, verbose=0, callbacks=keras_dist.callbacks(*callbacks))


@on_each_backend
@pytest.mark.long
@pytest.mark.parity("after `set_random_seed`: layers draw other numbers on each rank in `fit`")
def test_layers_draw_other_numbers_on_each_rank_in_fit_and_the_same_ones_again():
    def seen():
        keras.utils.set_random_seed(SEED)
        names, makers = zip(*LAYERS.items(), strict=True)
        model, recorded = model_of(*(make() for make in makers))
        assert all(equal(weight) for weight in model.weights)
        found = []
        for _ in range(2):
            for layer in recorded:
                layer.seen.clear()
            fit(model)
            for name, layer in zip(names, recorded, strict=True):
                # Symbolic calls and those of the build come before those of the steps.
                first, second = layer.seen[-2:]
                assert differ(first) and differ(second), name
                assert not np.array_equal(first, second), name
                found += [first, second]
        return found

    assert all(map(np.array_equal, seen(), seen()))


def draws():
    """Returns numbers from the generators of the process, by name."""
    found = {
        "keras.random": keras.random.normal((8,)),
        "python": [random.random() for _ in range(8)],
        "numpy": np.random.random(8),
    }
    if BACKEND == "tensorflow":
        import tensorflow as tf

        found["tf.random"] = tf.random.normal((8,))
    if BACKEND == "torch":
        import torch

        found["torch"] = torch.rand(8)
    return found


class Fail(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        raise RuntimeError("the end")


@on_each_backend
@pytest.mark.parametrize("fails", [False, True])
def test_generators_of_the_processes_are_equal_after_fit(fails):
    keras.utils.set_random_seed(SEED)
    model, _ = model_of(keras.layers.Dropout(0.5))
    if fails:
        with pytest.raises(RuntimeError, match="the end"):
            fit(model, Fail())
    else:
        fit(model)
    assert all(equal(value) for value in draws().values())


class AveragesItself(keras.Sequential):
    """A model that may average gradients in its step, so that `fit` takes a plain optimizer."""

    def train_step(self, *arguments):
        return super().train_step(*arguments)


@on_each_backend
@pytest.mark.parity("a `train_step` of one's own and a plain optimizer: other numbers on each rank")
@pytest.mark.filterwarnings("ignore:.*to be distributed")
def test_a_train_step_of_ones_own_with_a_plain_optimizer():
    keras.utils.set_random_seed(SEED)
    makers = [make for name, make in LAYERS.items() if "Random" not in name]
    made, recorded = model_of(*(make() for make in makers))
    model = AveragesItself([keras.Input((4, 4, 4)), *made.layers])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=BACKEND != "tensorflow")
    fit(model)
    assert all(differ(layer.seen[-1]) for layer in recorded)


class TrainsAnother(keras.Sequential):
    """A model whose step trains another one as well."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.another.train_on_batch(*data)
        return logs


@pytest.mark.filterwarnings("ignore:.*to be distributed")
def test_a_step_within_a_step_draws_other_numbers():
    keras.utils.set_random_seed(SEED)
    (outer, [noise]), (inner, [within]) = (model_of(FrameworkNoise()) for _ in range(2))
    model = TrainsAnother([keras.Input((4, 4, 4)), *outer.layers])
    model.another = inner
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    fit(model)
    drawn = [*noise.seen, *within.seen]
    assert len({values.tobytes() for values in drawn}) == len(drawn) == 4


def test_ranks_that_differ_before_fit_differ_after_it():
    keras.utils.set_random_seed(SEED + keras_dist.rank())
    model, recorded = model_of(keras.layers.Dropout(0.5))
    fit(model)
    assert differ(recorded[0].seen[-1])
    assert all(differ(value) for value in draws().values())


@on_each_backend
@pytest.mark.parity("`separate_seeds`: other numbers on each rank in a loop of one's own")
def test_separate_seeds_in_a_loop_of_ones_own():
    def outputs(separates):
        keras.utils.set_random_seed(SEED)
        keras.random.normal(())  # Keras makes its generator, with a seed from Python's
        model = keras.Sequential([keras.Input((4, 4, 4)), *(make() for make in LAYERS.values())])
        if separates:
            keras_dist.separate_seeds(model)
        inputs = np.full((2, 4, 4, 4), 0.5, "float32")
        return [model(inputs, training=True), *draws().values()]

    without = outputs(False)
    assert all(equal(value) for value in without)
    found = outputs(True)
    assert all(differ(value) for value in found)
    kept = [gathered(value)[0] for value in found]
    assert kept == [gathered(value)[0] for value in without]  # the root's
    keras.utils.set_random_seed(SEED)
    assert all(equal(value) for value in draws().values())


@on_each_backend
@pytest.mark.parity("`keras.random` with an integer as seed is equal on all ranks")
def test_an_integer_as_seed_is_equal_on_all_ranks():
    keras_dist.separate_seeds()
    assert equal(keras.random.normal((8,), seed=SEED))


@on_each_backend
@pytest.mark.parity("arrays that `fit` shuffles have equal orders until `separate_seeds`")
@pytest.mark.parametrize("separates", [False, True])
def test_arrays_that_keras_shuffles_have_equal_orders_until_seeds_are_separated(separates):
    class Inputs(Recorded):
        def call(self, inputs, training=None):
            if training:
                self.record(inputs)
            return inputs

    keras.utils.set_random_seed(SEED)
    seen = Inputs(keras.layers.Identity())
    model = keras.Sequential([keras.Input((1,)), seen, keras.layers.Dense(1)])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", run_eagerly=BACKEND != "tensorflow")
    if separates:
        keras_dist.separate_seeds()
    x = np.arange(32, dtype="float32")[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of equal batches
        model.fit(x, x, batch_size=32, verbose=0, callbacks=keras_dist.callbacks())
    assert sorted(seen.seen[-1].ravel()) == x.ravel().tolist()
    assert differ(seen.seen[-1]) if separates else equal(seen.seen[-1])


@on_each_backend
@pytest.mark.parity("`separate_seeds`: augmentation layers in `map`")
@pytest.mark.parametrize("seed", [None, 3])
def test_separate_seeds_of_layers_in_map(seed):
    import tensorflow as tf

    def made():
        keras.utils.set_random_seed(SEED)
        layer = keras.layers.RandomBrightness(0.5, (0.0, 1.0), seed=seed)
        images = tf.data.Dataset.from_tensor_slices(np.full((8, 4, 4, 3), 0.5, "float32"))
        return layer, images.map(lambda image: layer(image, training=True)).batch(8)

    _, images = made()
    assert equal(np.array(next(iter(images))))
    layer, images = made()
    keras_dist.separate_seeds(layer)
    assert differ(np.array(next(iter(images))))


@on_each_backend
def test_seeds_are_separate_where_other_frameworks_are_hidden(monkeypatch):
    for name in {"tensorflow", "jax", "torch"} - {BACKEND}:
        monkeypatch.setitem(sys.modules, name, None)  # so that Keras does not import it
    keras.utils.set_random_seed(SEED)
    model, _ = model_of(keras.layers.Dropout(0.5))
    fit(model)


def test_a_sampler_of_torch_draws_the_same_order_on_all_ranks_in_fit():
    import torch

    count = 4 * keras_dist.size()

    class Strided(torch.utils.data.Sampler):
        def __iter__(self):
            order = torch.randperm(count).tolist()[keras_dist.rank() :: keras_dist.size()]
            seen.append(order)
            return iter(order)

        def __len__(self):
            return 4

    seen = []
    keras.utils.set_random_seed(SEED)
    values = torch.rand(count, 1)
    pairs = torch.utils.data.TensorDataset(values, values)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    loader = torch.utils.data.DataLoader(pairs, 2, sampler=Strided())
    model.fit(loader, epochs=2, verbose=0, callbacks=keras_dist.callbacks())
    for orders in zip(*keras_dist.allgather_object(seen), strict=True):
        assert sorted(index for order in orders for index in order) == list(range(count))
