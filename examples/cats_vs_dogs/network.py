"""Two networks that tell cats from dogs: a small one, and one that has learnt from photographs."""

import keras
from once_per_node import fetch

import keras_dist

SIZE_OF_MOBILENET = 96  # pixels of both sides, for which there are weights


def make_network(name, image_size):
    """Returns a network whose output is how likely a dog is.

    Collective: every rank must call it.

    Args:
        name: `"small"`, or `"mobilenet"`; the latter is the small one where its weights cannot
            be downloaded.
        image_size: pixels of both sides.
    """
    if name == "mobilenet":
        if fetch(_mobilenet):
            return _with_mobilenet(image_size)
        if keras_dist.rank() == 0:
            print("So the small network learns in place of MobileNetV2.")
    return _small(image_size)


def _small(image_size):
    """A convolutional network with 80,000 weights, all of which learn."""
    layers = [keras.Input((image_size, image_size, 3)), keras.layers.Rescaling(1 / 127.5, -1)]
    for filters in (16, 32, 64, 96):
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), *_head()]
    return keras.Sequential(layers, name="small")


def _with_mobilenet(image_size):
    """MobileNetV2 as it was trained on ImageNet, frozen, with a head that learns."""
    application = _mobilenet()
    application.trainable = False
    layers = [
        keras.Input((image_size, image_size, 3)),
        keras.layers.Resizing(SIZE_OF_MOBILENET, SIZE_OF_MOBILENET),
        keras.layers.Rescaling(1 / 127.5, -1),
        application,
        *_head(),
    ]
    return keras.Sequential(layers, name="mobilenet")


def _mobilenet():
    shape = (SIZE_OF_MOBILENET, SIZE_OF_MOBILENET, 3)
    return keras.applications.MobileNetV2(shape, include_top=False, pooling="avg")


def _head():
    return [keras.layers.Dropout(0.2), keras.layers.Dense(1, activation="sigmoid")]
