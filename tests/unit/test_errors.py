"""Errors: their messages, and what else they are made of."""

import copy
import errno
import pickle

import pytest

from keras_dist import errors

FOUR = ("[here]", "a number", "none", "Pass one.")
SAID = "[here] Expected a number. Received: none. Pass one."


@pytest.mark.parametrize("kind", [errors.UsageError, errors.CheckpointError])
def test_four_parts_are_joined(kind):
    error = kind(*FOUR)
    copies = [error, copy.copy(error), pickle.loads(pickle.dumps(error))]
    assert [str(each) for each in copies] == [SAID] * 3


def test_other_arguments_stay():
    class Own(errors.UsageError):
        def __init__(self, code, text):
            super().__init__(code, text)

    assert Own(3, "text").args == (3, "text")
    assert errors.CheckpointError(errno.ENOSPC, "no space", "file").errno == errno.ENOSPC
