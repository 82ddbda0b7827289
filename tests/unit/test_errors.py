"""Errors: their messages, what else they are made of, and those of what has been removed."""

import argparse
import copy
import errno
import pickle

import pytest

import keras_dist
from keras_dist import errors
from keras_dist.launch.cli import bench

FOUR = ("[here]", "a number", "none", "Pass one.")
SAID = "[here] Expected a number. Received: none. Pass one."


@pytest.mark.parametrize("kind", [errors.UsageError, errors.CheckpointError])
def test_four_parts_are_joined(kind):
    error = kind(*FOUR)
    copies = [error, copy.copy(error), pickle.loads(pickle.dumps(error))]
    assert [str(each) for each in copies] == [SAID] * 3


def test_an_error_says_where_it_is_raised(monkeypatch):
    monkeypatch.setattr(errors, "where", lambda: "[here]")
    assert str(errors.UsageError(*FOUR[1:])) == SAID


def test_other_arguments_stay():
    class Own(errors.UsageError):
        def __init__(self, code, text):
            super().__init__(code, text)

    assert Own(3, "text").args == (3, "text")
    assert errors.CheckpointError(errno.ENOSPC, "no space", "file").errno == errno.ENOSPC


REMOVED = {
    "Pipeline": (lambda: keras_dist.Pipeline, AttributeError, "send and recv"),
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
