"""From a list of files to batches of images, each rank its part of the files."""

import keras
import pandas as pd
import tensorflow as tf
from images import category_of
from sklearn.model_selection import train_test_split

import keras_dist

PARALLEL = tf.data.AUTOTUNE


def prediction_map(files):
    """Returns a DataFrame with a row for each file: `file`, `category`, and `label` (1: dog)."""
    frame = pd.DataFrame({"file": files, "category": [category_of(file) for file in files]})
    return frame.assign(label=(frame.category == "dog").astype("float32"))


def split(frame, test_share=0.2, seed=0):
    """Returns rows to learn from and rows to test with, as many of each category in both."""
    return train_test_split(frame, test_size=test_share, stratify=frame.category, random_state=seed)


def batches(frame, image_size, batch_size, *, training=False, seed=0):
    """Returns this rank's batches of images and labels; in training shuffled and augmented.

    Collective: every rank must call it, with the same rows.

    Args:
        frame: rows with `file` and `label`.
        image_size: pixels of both sides.
        batch_size: images in a step of this rank.
        training: whether they are learnt from.
        seed: from which the order follows.
    """
    label_of = dict(zip(frame.file, frame.label, strict=True))

    def read(files):
        rows = tf.data.Dataset.from_tensor_slices((files, [label_of[file] for file in files]))
        return rows.map(
            lambda file, label: (decode(file, image_size), label), num_parallel_calls=PARALLEL
        )

    part = keras_dist.data.shard(
        list(frame.file), batch_size=batch_size, reader=read, shuffle=training, seed=seed
    )
    if training:
        augment = augmentation(seed)
        part = part.map(lambda images, labels: (augment(images), labels), PARALLEL)
    return part.prefetch(PARALLEL)


def decode(file, image_size):
    """Returns the image in a file, as large as wanted, with values from 0 to 255."""
    image = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
    return tf.image.resize(image, (image_size, image_size), antialias=True)


def augmentation(seed):
    """Returns a function that changes images in ways that leave a cat a cat."""
    layers = [
        keras.layers.RandomFlip("horizontal", seed=seed),
        keras.layers.RandomTranslation(0.08, 0.08, seed=seed),
    ]

    def augment(images):
        for layer in layers:
            images = layer(images, training=True)
        return images

    return augment
