"""`shard`: arguments, data that is refused, and imports."""

import collections
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import tensorflow as tf
import torch
from data_sources import PyBatches, Samples, TorchSamples

import keras_dist
from keras_dist import errors
from keras_dist.data import shard, sharding
from keras_dist.data.shard_options import ShardOptions

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="for one process")

Data, Argument, Kind = errors.DataError, errors.ArgumentError, errors.ArgumentTypeError
NAMES = ["a", "b", "c", "d"]


def numbers(count):
    return tf.data.Dataset.range(count)


def weighted_loader():
    sampler = torch.utils.data.WeightedRandomSampler([1] * 9, 9)
    return torch.utils.data.DataLoader(TorchSamples(9), sampler=sampler)


class Endless(torch.utils.data.Dataset):
    """A data set of torch without a length."""

    def __getitem__(self, index):
        return index


class Filtered(Samples):
    """Samples of which a filter has left out the first, as of grain."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index else None


class Late(Samples):
    """Samples of which a filter has left out others than the first."""

    def __getitem__(self, index):
        return None if index == 5 else super().__getitem__(index)


# Of four ranks; what raises, and a part of its text. tests/golden/errors.txt has others.
REFUSED = [
    ("file.txt", {}, Kind, "str"),
    (b"x", {}, Kind, "bytes"),
    (None, {}, Kind, "NoneType"),
    # Arrays
    ({"x": np.arange(8), "y": np.ones(())}, {}, Data, "data['y'] a scalar"),
    ([], {}, Data, "no array"),
    ((np.arange(8), [1, 2]), {}, Kind, "data[1][0]"),
    (np.arange(8), {"reader": len}, Argument, "reader"),
    (np.arange(8), {"shuffle_buffer": 9}, Argument, "shuffle_buffer=9"),
    (pd.DataFrame({"a": ["x"] * 9, "b": 1}), {}, Kind, "dict(frame)"),
    (np.ma.masked_equal([[0, 51], [255, 255]], 255), {}, Data, "masked values. Received: 2."),
    # Data sets with a length
    (PyBatches(5), {}, Data, "at least 4 batches"),
    (Samples(3), {}, Data, "at least 4 samples"),
    (Samples(0), {}, Data, "samples"),
    (TorchSamples(3), {}, Data, "at least 4 samples"),
    (PyBatches(90), {"batch_size": 3}, Argument, "no batch_size"),
    (PyBatches(90), {"batched": False}, Argument, "batched=False"),
    (weighted_loader(), {}, Argument, "WeightedRandomSampler"),
    (Endless(), {}, Data, "without one"),
    (scipy.sparse.eye(9, format="csr"), {}, Data, "without one"),
    (Filtered(9), {}, Data, "None, from a Filtered"),
    (collections.UserDict(x=np.arange(9)), {}, Kind, "dict(data)"),
    # In order
    (lambda: iter(range(3)), {"batch_size": 1}, Data, "at least 4 samples"),
    (lambda: 3, {}, Kind, "return a generator"),
    (lambda: iter([1]), {"shuffle": True}, Argument, "no shuffle"),
    (lambda: iter([1]), {"draws": True}, Argument, "random access to samples"),
    # tf.data
    (numbers(3), {"batch_size": 2}, Data, "at least 4 samples"),
    (numbers(0), {"batch_size": 2}, Data, "at least 4 samples"),
    (numbers(0).batch(2), {}, Data, "at least 4 batches"),
    (numbers(3).batch(2), {}, Data, "at least 4 samples"),
    (numbers(6).batch(2), {"remainder": "drop"}, Data, "4 batches"),
    (numbers(9).repeat(), {"batch_size": 2}, Data, ".repeat()"),
    (numbers(9).repeat().batch(2), {}, Data, ".repeat()"),
    (numbers(9).filter(lambda _: True), {"batch_size": 2}, Data, "Pass steps"),
    (numbers(9).batch(2).filter(lambda _: True), {}, Data, "assert_card"),
    (numbers(9), {}, Data, "Pass batch_size"),
    (numbers(9), {"batch_size": 2, "steps": 2}, Data, "steps=2"),
    (numbers(9).batch(1), {"steps": 3}, Data, "steps=3"),
    (numbers(9).batch(1), {"shuffle": True}, Argument, "no shuffle"),
    (numbers(9), {"batch_size": 2, "reader": len}, Argument, "reader"),
    # Files
    (["a"], {}, Data, "Pass reader"),
    (NAMES, {"batch_size": 2}, Argument, "Pass reader"),
    (NAMES, {"shuffle": True}, Argument, "Pass reader"),
    (NAMES, {"reader": list}, Kind, "reader to return"),
    (NAMES, {"reader": "tfrecord"}, Kind, "reader to be"),
    (NAMES, {"reader": lambda names: numbers(9).repeat()}, Data, "no end"),
    (["a"], {"reader": lambda names: numbers(9).shuffle(9)}, Data, "same order"),
    (NAMES, {"reader": len, "shuffle": "global"}, Argument, "reader(files)"),
]


@pytest.mark.parametrize(("made", "arguments", "error", "culprit"), REFUSED)
def test_bad_input_is_refused_on_every_rank(made, arguments, error, culprit):
    tf.random.set_seed(None)
    for rank in (0, 3):
        with pytest.raises(error, match=r"^\[rank 0 of 1\] Expected .* Received: ") as caught:
            options = ShardOptions(**arguments, rank=rank, size=4)
            sharding._source(made, options)
        assert culprit in str(caught.value)


def test_a_sample_that_a_filter_leaves_out_is_an_error():
    part = shard(Late(9), 2, shuffle=False)
    with pytest.raises((tf.errors.OpError, Data), match="None, from a Late"):
        list(part)


@pytest.mark.parametrize("value", [2.5, "3", True, float("inf"), -1, 0])
def test_counts_are_whole_numbers(value):
    error = Argument if value in (-1, 0) and value is not True else Kind
    for name in ("batch_size", "steps", "shuffle_buffer", *["seed"] * (value != 0)):
        with pytest.raises(error, match=rf"^\[rank 0 of 1\] Expected {name} to be"):
            shard(numbers(9), **{"batch_size": 2, name: value})


def test_whole_numbers_of_numpy_are_taken():
    assert len(shard(np.arange(9), np.int64(3), seed=np.uint8(2))) == 3


def test_terms_are_the_arguments_that_ranks_compare():
    facts = {fact.label: fact.value for fact in ShardOptions(batch_size=3).facts()}
    assert facts["batch_size"] == 3
    named = {
        "the use of a reader",
        *"batch_size global_batch_size batched shuffle seed remainder steps".split(),
        "shuffle_buffer",
    }
    assert set(facts) == named


def test_importing_costs_no_framework():
    code = (
        "import sys, keras_dist.data\n"
        "print([name for name in ('tensorflow', 'keras', 'jax', 'torch') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr
