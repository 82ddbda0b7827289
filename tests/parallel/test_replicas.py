"""Differences between replicas are found and named."""

import keras
import numpy as np
import pytest
from training import agreed, make_data, make_model

import keras_dist
from keras_dist import errors, replicas


def test_equal_replicas_pass():
    model = make_model()
    keras_dist.verify_replicas(model)


@pytest.mark.parity("`verify_replicas` names variables and ranks")
def test_a_difference_is_named_with_its_ranks():
    if keras_dist.size() == 1:
        pytest.skip("ranks cannot differ when there is one")
    model = make_model(regularised=True)
    last = keras_dist.size() - 1
    if keras_dist.rank() == last:
        model.weights[1].assign(model.weights[1] + 1e-7)
    with pytest.raises(errors.MismatchError) as caught:
        keras_dist.verify_replicas(model)
    assert f"{model.weights[1].path} (ranks {last})" in str(caught.value)
    assert str(caught.value).count("(ranks") == 1


def test_optimizer_state_counts():
    if keras_dist.size() == 1:
        pytest.skip("ranks cannot differ when there is one")
    model = make_model(keras.optimizers.Adam())
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(keras_dist.rank())
    with pytest.raises(errors.MismatchError, match="iteration"):
        keras_dist.verify_replicas(model)


@pytest.mark.parity("moving statistics are averaged")
def test_statistics_are_averaged_and_equal_weights_keep_their_bits():
    rank, size = keras_dist.rank(), keras_dist.size()
    model = make_model(regularised=True)
    model.layers[0].trainable = False
    frozen = np.array(model.layers[0].kernel).tobytes()
    mean = model.layers[1].moving_mean
    mean.assign(np.full(mean.shape, rank, "float32"))
    replicas.average_statistics(model)
    np.testing.assert_allclose(np.array(mean), (size - 1) / 2)
    assert np.array(model.layers[0].kernel).tobytes() == frozen
    keras_dist.verify_replicas(model)


def test_whole_numbers_come_from_the_root():
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(
                shape=(), dtype="int32", trainable=False, name="seen", initializer="zeros"
            )

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((2,)), Counting()])
    model.layers[0].seen.assign(7 + keras_dist.rank())
    replicas.average_statistics(model)
    assert int(np.array(model.layers[0].seen)) == 7


def test_the_roots_state_reaches_every_rank():
    for root in range(keras_dist.size()):
        model = make_model(keras.optimizers.SGD(0.1, momentum=0.9), regularised=True)
        x, y = make_data(8, seed=keras_dist.rank())
        model.fit(x, y, verbose=0)
        before = keras_dist.broadcast_object([w.tobytes() for w in model.get_weights()], root)
        replicas.broadcast_state(model, root)
        assert [w.tobytes() for w in model.get_weights()] == before
        keras_dist.verify_replicas(model)
        assert agreed([np.array(v).tobytes() for v in model.optimizer.variables])
