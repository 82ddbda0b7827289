"""`shard`: supported kinds of data, arguments, and imports."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist
from keras_dist import errors
from keras_dist.data import consistency, shard
from keras_dist.data.shard_options import Fact, ShardOptions

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="for one process")


def test_fit_trains_on_a_pipeline():
    x, y = np.ones((13, 3), "float32"), np.zeros((13, 1), "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    steps = []
    counter = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: steps.append(step)
    )
    part = shard(tf.data.Dataset.from_tensor_slices((x, y)), 4)
    model.fit(part, epochs=2, callbacks=[counter], verbose=0, shuffle=False)
    assert steps == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("data", ["file.txt", None, 3, object(), b"x"])
def test_unknown_data_is_refused_and_the_known_kinds_are_named(data):
    with pytest.raises(errors.ArgumentTypeError, match=r"tf\.data\.Dataset") as caught:
        shard(data, 2)
    assert type(data).__name__ in str(caught.value)


@pytest.mark.parametrize("name", ["batch_size", "steps", "shuffle_buffer", "seed"])
@pytest.mark.parametrize("value", [2.5, "3", True, float("inf"), -1])
def test_counts_are_whole_numbers(name, value):
    error = errors.ArgumentError if value == -1 else errors.ArgumentTypeError
    with pytest.raises(error, match=rf"^\[rank 0 of 1\] Expected {name} to be"):
        shard(tf.data.Dataset.range(9), **{"batch_size": 2, name: value})


@pytest.mark.parametrize("name", ["batch_size", "steps", "shuffle_buffer"])
def test_zero_is_no_size(name):
    with pytest.raises(errors.ArgumentError, match=f"{name} to be at least 1"):
        shard(tf.data.Dataset.range(9), **{"batch_size": 2, name: 0})


def test_whole_numbers_of_numpy_are_taken():
    assert len(shard(np.arange(9), np.int64(3), seed=np.uint8(2))) == 3


def test_other_arguments_are_checked():
    with pytest.raises(errors.ArgumentError, match="'uneven', 'pad', 'drop'"):
        shard(np.arange(9), remainder="repeat")
    with pytest.raises(errors.ArgumentTypeError, match="shuffle to be True, False or 'global'"):
        shard(np.arange(9), shuffle=1000)
    with pytest.raises(errors.ArgumentTypeError, match="reader to be a function"):
        shard(["a"], reader="tfrecord")


def test_terms_are_the_arguments_that_ranks_compare():
    facts = {fact.label: fact.value for fact in ShardOptions(batch_size=3).facts()}
    assert facts["batch_size"] == 3
    named = {
        "the use of a reader",
        *"batch_size global_batch_size batched shuffle seed remainder steps".split(),
        "shuffle_buffer",
    }
    assert set(facts) == named


def test_the_first_difference_is_told_in_one_text():
    same, other = Fact("the number of samples", 8), Fact("the number of samples", 9, "Mend it.")
    consistency._compare([[same], [same]])
    with pytest.raises(errors.MismatchError) as caught:
        consistency._compare([[same], [same], [other]])
    assert str(caught.value) == (
        "[rank 2 of 3] Expected the number of samples to be 8 as on rank 0. Received: 9. "
        "Pass the same arguments to shard() on every rank."
    )


def test_an_error_that_is_not_ours_comes_through():
    def survey():
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="gone"):
        consistency.prepare(survey)


def test_importing_costs_no_framework():
    code = (
        "import sys, keras_dist.data\n"
        "print([name for name in ('tensorflow', 'keras', 'jax', 'torch') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr
