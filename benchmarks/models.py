"""The models of the benchmark of fit, with random data of the right kind."""

import dataclasses
from collections.abc import Callable

import numpy as np

__all__ = ["MODELS", "Model"]

WORDS, LENGTH, WIDTH = 10_000, 64, 128  # of the transformer
USERS, ITEMS = 100_000, 20_000  # of the recommender


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that nobody has tuned for.

    Args:
        title: what the tables call it.
        batch_size: samples a rank and step.
        make: returns the Keras model, not compiled.
        inputs: returns the input arrays, of a generator and a number of samples.
        classes: number of classes of its labels.
    """

    title: str
    batch_size: int
    make: Callable
    inputs: Callable
    classes: int = 10

    def data(self, count, seed):
        """Returns random inputs and labels, the same for the same seed."""
        random = np.random.default_rng(seed)
        return self.inputs(random, count), random.integers(0, self.classes, count)

    def compiled(self, optimizer):
        """Returns the model, compiled, with the same initial weights in every process."""
        import keras

        keras.utils.set_random_seed(0)
        model = self.make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss)
        return model


def images(*shape):
    return lambda random, count: random.random((count, *shape), np.float32)


def mlp():
    import keras
    from keras import layers

    stack = [layers.Flatten(), *(layers.Dense(2048, activation="relu") for _ in range(3))]
    return keras.Sequential([keras.Input((28, 28)), *stack, layers.Dense(10)])


def wide():
    import keras
    from keras import layers

    stack = [layers.Flatten(), *(layers.Dense(3328, activation="relu") for _ in range(3))]
    return keras.Sequential([keras.Input((28, 28)), *stack, layers.Dense(10)])


def cnn():
    import keras
    from keras import layers

    stack = [
        layers.Reshape((28, 28, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
    ]
    return keras.Sequential([keras.Input((28, 28)), *stack, layers.Dense(10)])


def residual():
    """Returns the network of 20 layers that He et al. trained on CIFAR-10."""
    import keras
    from keras import layers

    def convolved(x, filters, stride=1):
        x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolved(inputs, 16))
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if block == 0 and filters > 16 else 1
            shortcut = x if stride == 1 else layers.Conv2D(filters, 1, stride)(x)
            y = layers.ReLU()(convolved(x, filters, stride))
            x = layers.ReLU()(convolved(y, filters) + shortcut)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def transformer():
    import keras
    from keras import layers

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(inputs)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, WIDTH // 4)(x, x)
        x = layers.LayerNormalization()(x + attended)
        dense = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "relu")(x))
        x = layers.LayerNormalization()(x + dense)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def lstm():
    import keras
    from keras import layers

    return keras.Sequential([keras.Input((32, 64)), layers.LSTM(256), layers.Dense(10)])


def recommender():
    import keras
    from keras import layers

    user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    both = [layers.Embedding(USERS, 64)(user), layers.Embedding(ITEMS, 64)(item)]
    x = layers.Concatenate()(both)
    for units in (256, 128):
        x = layers.Dense(units, "relu")(x)
    return keras.Model([user, item], layers.Dense(10)(x))


def resnet50():
    import keras

    return keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=1000, classifier_activation=None
    )


def words(random, count):
    return random.integers(0, WORDS, (count, LENGTH), np.int32)


def pairs(random, count):
    return tuple(random.integers(0, size, count, np.int32) for size in (USERS, ITEMS))


MODELS = {
    "mlp": Model("MLP, 40 MB", 128, mlp, images(28, 28)),
    "wide": Model("MLP, 99 MB", 128, wide, images(28, 28)),
    "cnn": Model("CNN, 4.8 MB", 128, cnn, images(28, 28)),
    "residual": Model("residual network, 1.1 MB", 32, residual, images(32, 32, 3)),
    "transformer": Model("transformer, 6.7 MB", 32, transformer, words),
    "lstm": Model("LSTM, 1.3 MB", 64, lstm, images(32, 64)),
    "recommender": Model("recommender, 31 MB of rows", 512, recommender, pairs),
    "resnet50": Model("ResNet-50, 102 MB", 8, resnet50, images(64, 64, 3), 1000),
}
