"""Verification, averaging and broadcast of replicas."""

import keras
import numpy as np
import pytest
from small_training import agreed, distributed, make_data, make_model

import keras_dist
from keras_dist import errors, runtime
from keras_dist.training import model_state, replicas

pytestmark = pytest.mark.jobs("hooks", "jax-2")


on_several = pytest.mark.skipif(keras_dist.size() == 1, reason="a single rank cannot differ")


def states_of(model):
    return [np.array(generator).tobytes() for generator in model_state.random_states(model)]


def test_equal_replicas_pass():
    model = make_model(regularised=True)
    keras_dist.separate_seeds(model)  # random generators differ, which is not compared
    before = [weight.tobytes() for weight in model.get_weights()]
    keras_dist.verify_replicas(model)
    assert [weight.tobytes() for weight in model.get_weights()] == before
    assert agreed(before)
    assert len(set(map(tuple, keras_dist.allgather_object(states_of(model))))) == keras_dist.size()


@on_several
@pytest.mark.jobs("torch-3")
@pytest.mark.parity("`verify_replicas` names variables and ranks")
def test_every_difference_is_named_with_its_own_ranks():
    model = make_model(keras.optimizers.Adam(), regularised=True)
    model.optimizer.build(model.trainable_variables)
    first, *_, last = model.trainable_weights
    rank, size = keras_dist.rank(), keras_dist.size()
    first.assign(first + 1e-7 * (rank == size - 1))
    last.assign(last + (rank > 0))
    model.optimizer.iterations.assign(rank)
    with pytest.raises(errors.MismatchError) as caught:
        keras_dist.verify_replicas(model)
    others = ", ".join(map(str, range(1, size)))
    named = f"{first.path} (ranks {size - 1}); {last.path} (ranks {others}); "
    assert f"Received: differences from rank 0 in {named}" in str(caught.value)
    assert f"iteration (ranks {others}). " in str(caught.value)
    assert str(caught.value).count("(ranks") == 3


@on_several
def test_at_most_eight_differences_are_named():
    model = make_model(keras.optimizers.SGD(momentum=0.9), regularised=True)
    model.optimizer.build(model.trainable_variables)
    different = [*model.weights, *model.optimizer.momentums][:11]
    for variable in different:
        variable.assign(variable + keras_dist.rank())
    with pytest.raises(errors.MismatchError, match=r" and 3 more\. ") as caught:
        keras_dist.verify_replicas(model)
    assert str(caught.value).count("(ranks") == 8


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


class RecordStatistics(keras.callbacks.Callback):
    """Records the moving statistics at the start of validation."""

    def on_test_begin(self, logs=None):
        self.found = [np.array(v).tobytes() for v in self.model.non_trainable_weights]


def test_statistics_are_averaged_before_validation():
    x, y = make_data(8, seed=keras_dist.rank())
    model = distributed(regularised=True)
    seen = RecordStatistics()
    callbacks = keras_dist.callbacks(seen)
    model.fit(x, y, verbose=0, validation_data=(x, y), callbacks=callbacks[:-3])
    assert agreed(seen.found)


def test_integer_weights_are_broadcast_from_the_root():
    class Counter(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(
                shape=(), dtype="int32", trainable=False, name="seen", initializer="zeros"
            )

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((2,)), Counter()])
    model.layers[0].seen.assign(7 + keras_dist.rank())
    replicas.average_statistics(model)
    assert int(np.array(model.layers[0].seen)) == 7


@pytest.mark.jobs("training-double-torch-2", "torch-3")
def test_the_state_of_any_root_is_broadcast():
    for root in range(keras_dist.size()):
        model = make_model(keras.optimizers.SGD(0.1, momentum=0.9), regularised=True)
        x, y = make_data(8, seed=keras_dist.rank())
        model.fit(x, y, verbose=0)
        before = keras_dist.broadcast_object([w.tobytes() for w in model.get_weights()], root)
        replicas.broadcast_state(model, root)
        assert [w.tobytes() for w in model.get_weights()] == before
        keras_dist.verify_replicas(model)
        assert agreed([np.array(v).tobytes() for v in model.optimizer.variables])


@on_several
@pytest.mark.parametrize("last", [(), (5,)])
def test_variables_that_differ_are_found_before_a_part_is_broadcast(monkeypatch, last):
    monkeypatch.setattr(replicas, "MOST_NBYTES", 1)
    comm, rank = runtime.communicator(), keras_dist.rank()
    shapes = [(2,), (3,), (4,)]
    if rank == comm.size - 1:
        shapes[2:] = [last] if last else []
    variables = [
        keras.Variable(np.full(shape, rank, "float32"), name=name)
        for name, shape in zip("abc", shapes, strict=False)
    ]
    expected = "'.*c' with shape" if last else "3 arrays in the broadcast of a model"
    with pytest.raises(errors.MismatchError, match=expected):
        replicas.broadcast_variables(comm, variables, 0)
    assert all((model_state.to_numpy(variable) == rank).all() for variable in variables)
    replicas.broadcast_variables(comm, variables[:2], 0)
    assert all((model_state.to_numpy(variable) == 0).all() for variable in variables[:2])
