"""A warning about ranks with equal batches, which consumes no data."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_training import BATCH, distributed, make_data, weights_of

import keras_dist
from keras_dist.callbacks import VerifyBatches

pytestmark = [
    pytest.mark.jobs("tensorflow-2"),
    pytest.mark.skipif(keras_dist.size() == 1, reason="one rank has no other with its batch"),
]


def told_by(fit):
    """The warnings of rank 0 about batches in a fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    texts = [str(one.message) for one in caught if "first batch" in str(one.message)]
    return keras_dist.allgather_object(texts)


def trained(x, y=None, verified=True, **options):
    """The weights after a fit with or without the callback, and the warnings."""
    model = distributed(steps_per_execution=options.pop("steps_per_execution", 1))
    callbacks = [
        one for one in keras_dist.callbacks() if verified or not isinstance(one, VerifyBatches)
    ]
    told = told_by(lambda: model.fit(x, y, verbose=0, callbacks=callbacks, **options))
    return weights_of(model), told


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_equal_batches_are_told_by_the_root_and_none_is_lost(steps_per_execution):
    x, y = make_data(5 * BATCH)
    options = {"batch_size": BATCH, "shuffle": False, "epochs": 2}
    options["steps_per_execution"] = steps_per_execution
    weights, told = trained(x, y, **options)
    plain, _ = trained(x, y, verified=False, **options)
    for value, expected in zip(weights, plain, strict=True):
        np.testing.assert_array_equal(value, expected)
    ranks = ", ".join(map(str, range(keras_dist.size())))
    [text], *others = told
    assert f"the same batch on ranks {ranks}. Shard" in text and text.startswith("[rank 0 of ")
    assert not any(others)


def test_other_batches_and_data_of_shard_are_not_told():
    x, y = make_data(3 * BATCH, seed=keras_dist.rank())
    _, told = trained(x, y, batch_size=BATCH, validation_data=make_data(2))
    assert not any(told)
    rows = 4 * BATCH * keras_dist.size()
    same = (np.zeros((rows, 6), "float32"), np.zeros(rows, "int32"))
    _, told = trained(keras_dist.data.shard(same, BATCH))
    assert not any(told)
    alike = tf.data.Dataset.from_tensor_slices(same).batch(BATCH)
    _, told = trained(alike, class_weight={0: 1.0, 1: 2.0})
    assert [len(texts) for texts in told] == [1] + [0] * (keras_dist.size() - 1)


def test_a_model_that_makes_its_train_function_itself():
    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            if self.train_function is None or force:
                self.train_function = lambda *_: {"loss": 0.0}
            return self.train_function

    model = Own([keras.layers.Dense(1)])
    model.compile(
        keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", jit_compile=False
    )
    x = np.ones((8, 3), "float32")
    told = told_by(lambda: model.fit(x, x[:, :1], verbose=0, callbacks=[VerifyBatches()]))
    assert len(told[0]) == 1
