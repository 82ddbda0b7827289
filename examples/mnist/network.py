"""What both training scripts use: the network, and a clock."""

import time

import keras


def make_network(image_shape):
    """A small convolutional network for ten classes."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


class Clock(keras.callbacks.Callback):
    """Measures the training part of each epoch, validation left out."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_test_begin(self, logs=None):
        self.stop()

    def on_epoch_end(self, epoch, logs=None):
        self.stop()

    def stop(self):
        """Ends the measurement of this epoch, unless it has ended."""
        if self.start is not None:
            self.seconds.append(time.perf_counter() - self.start)
            self.start = None

    def images_per_second(self, images):
        """The speed of the fastest epoch, so that the first, which compiles, does not count."""
        return images / min(self.seconds)
