"""Handwritten digits: MNIST when Keras can get it, else the ones scikit-learn ships."""

import contextlib
import io
import socket

import keras
import numpy as np

import keras_dist


def load_digits():
    """Loads training and test images.

    Each node downloads once while its other ranks wait; where nodes share a home directory
    the first download serves them all. Collective: every rank must call it.

    Returns:
        `(x_train, y_train), (x_test, y_test), source`: float32 images of shape (count, height,
        width, 1) with values from 0 to 1, their digits as whole numbers, and a name.
    """
    fetched = True
    for my_turn in (keras_dist.rank() == 0, keras_dist.local_rank() == 0):
        if my_turn and fetched:
            fetched = _fetch_mnist()
        keras_dist.barrier()
    if keras_dist.allreduce(fetched, op="min"):
        train, test = keras.datasets.mnist.load_data()
        return _prepare(*train, 255), _prepare(*test, 255), "MNIST"
    return *_scikit_learn_digits(), "scikit-learn's digits (MNIST could not be downloaded)"


def _fetch_mnist():
    """Puts MNIST into Keras' cache; returns whether it is there."""
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    try:
        # Keras reports the download on the console; ranks would write over each other.
        with contextlib.redirect_stdout(io.StringIO()):
            keras.datasets.mnist.load_data()
    except Exception:
        return False
    finally:
        socket.setdefaulttimeout(patience)
    return True


def _scikit_learn_digits():
    from sklearn.datasets import load_digits as load

    digits = load()
    order = np.random.default_rng(0).permutation(len(digits.images))
    train, test = order[:-360], order[-360:]
    images, labels = digits.images, digits.target
    return _prepare(images[train], labels[train], 16), _prepare(images[test], labels[test], 16)


def _prepare(images, labels, brightest):
    return (images[..., np.newaxis] / brightest).astype("float32"), labels.astype("int64")
