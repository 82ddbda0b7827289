"""Pictures of CIFAR-10's shape: CIFAR-10 itself where it can be had, else made ones."""

import pickle
from pathlib import Path

import numpy as np

import keras_dist

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
MADE = "made pictures of CIFAR-10's shape (CIFAR-10 could not be downloaded)"


def load_pictures(cache, made):
    """Loads training and test pictures.

    One rank of each node downloads while the others wait. Collective: every rank must call it.

    Args:
        cache: a directory of the node.
        made: train on so many made pictures, without a download; 0: CIFAR-10, if it can be had.

    Returns:
        `(x_train, y_train), (x_test, y_test), source`: float32 pictures of shape (count, 32, 32, 3)
        with values from 0 to 1, their classes as whole numbers, and a name.
    """
    if made:
        return make_pictures(made, 0), make_pictures(made // 5, 1), "made pictures"
    try:
        archive = keras_dist.data.cached(SOURCE, cache, sha256=SHA256, unpack=True)
    except keras_dist.errors.DataError:
        return make_pictures(10_000, 0), make_pictures(2_000, 1), MADE
    [first] = Path(archive).rglob("data_batch_1")
    parts = [read(first.with_name(f"data_batch_{number}")) for number in range(1, 6)]
    train = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return train, read(first.with_name("test_batch")), "CIFAR-10"


def read(path):
    """Reads a file of CIFAR-10, which is a pickle."""
    with path.open("rb") as file:
        content = pickle.load(file, encoding="bytes")
    pictures = content[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return pictures.astype("float32") / 255, np.array(content[b"labels"], "int64")


def make_pictures(count, seed):
    """Draws stripes in noise: a class is their direction and colour."""
    rng = np.random.default_rng(seed)
    classes = np.arange(count) % 10
    angle = (classes % 5) * np.pi / 5
    across, down = np.meshgrid(np.arange(32), np.arange(32))
    along = np.cos(angle)[:, None, None] * across + np.sin(angle)[:, None, None] * down
    stripes = np.sin(along + rng.uniform(0, 2 * np.pi, (count, 1, 1)))[..., None]
    colour = np.where((classes < 5)[:, None], [1.0, 0.4, 0.2], [0.2, 0.4, 1.0])
    pictures = 0.5 + 0.2 * stripes * colour[:, None, None] + rng.normal(0, 0.2, (count, 32, 32, 3))
    return pictures.clip(0, 1).astype("float32"), classes
