"""What has been removed is an error that says what to use instead."""

import argparse

import pytest

import keras_dist
from keras_dist import errors
from keras_dist.launch.cli import bench

REMOVED = {
    "Pipeline": (lambda: keras_dist.Pipeline, AttributeError, "send and recv"),
    "share_out": (
        lambda: keras_dist.callbacks(share_out="at once"),
        errors.ArgumentError,
        "next epoch",
    ),
    "keras-dist bench --model": (
        lambda: bench._bench(argparse.Namespace(model="model.keras", batch_size=None)),
        errors.ArgumentError,
        "Pass --parameters",
    ),
}


@pytest.mark.parametrize("name", REMOVED)
def test_the_error_says_what_to_use(name):
    use, error, instead = REMOVED[name]
    with pytest.raises(error, match=instead):
        use()
    assert not hasattr(keras_dist, "Pipeline")
