"""`VerifyReplicas`: divergent replicas are reported or repaired between epochs."""

import re
import warnings

import keras
import pytest
from small_training import agreed, compiled, distributed, make_data, make_model, weights_of

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import VerifyReplicas
from keras_dist.training import agreement

pytestmark = pytest.mark.jobs("torch-2")


class Disturb(keras.callbacks.Callback):
    """Changes a weight on the last rank at the end of the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0 and keras_dist.rank() == keras_dist.size() - 1:
            weight = self.model.weights[0]
            weight.assign(weight + 1.0)


def fit(*callbacks):
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = make_model(optimizer, run_eagerly=True)
    callbacks = keras_dist.callbacks(*callbacks)
    return model, model.fit(*make_data(8), epochs=3, verbose=0, callbacks=callbacks)


def test_a_fit_without_callbacks_is_warned_of_once(caplog):
    agreement._warn_of_weights.cache_clear()
    for _ in range(2):
        distributed().fit(*make_data(8), verbose=0)
    make_model().fit(*make_data(8), verbose=0)  # not distributed: ranks may train alone
    told = caplog.text.count("none; the initial weights are not broadcast")
    assert told == (keras_dist.size() > 1 and keras_dist.rank() == 0)


def test_a_difference_ends_the_training_on_every_rank():
    if keras_dist.size() == 1:
        pytest.skip("a single rank has no other to differ from")
    with pytest.raises(errors.MismatchError) as caught:
        fit(Disturb(), VerifyReplicas(3))
    assert f"kernel (ranks {keras_dist.size() - 1})" in str(caught.value)
    # Keras numbers the models of a process in their names.
    assert agreed(re.sub(r"_\d+", "", str(caught.value).partition("]")[2]))


@pytest.mark.jobs("tensorflow-2", "jax-2", "training-double-torch-2")
@pytest.mark.parity("`VerifyReplicas(repair=True)`")
def test_a_difference_is_repaired_from_the_root_with_a_warning():
    if keras_dist.size() == 1:
        pytest.skip("a single rank has no other to differ from")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, history = fit(Disturb(), VerifyReplicas(repair=True))
    said = [str(warning.message) for warning in caught if "continue with" in str(warning.message)]
    assert len(said) == (1 if keras_dist.rank() == 0 else 0)
    assert len(history.epoch) == 3
    keras_dist.verify_replicas(model)
    undisturbed, _ = fit()
    for weight, expected in zip(weights_of(model), weights_of(undisturbed), strict=True):
        assert weight.tobytes() == expected.tobytes()


def test_local_variables_are_neither_broadcast_nor_repaired():
    model = make_model()
    local = model.layers[-1]
    local.kernel.assign(keras.ops.full(local.kernel.shape, float(keras_dist.rank())))
    optimizer = keras_dist.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.0, momentum=0.9), local_layers=[local]
    )
    compiled(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = keras_dist.callbacks(Disturb(), VerifyReplicas(repair=True))
        model.fit(*make_data(8), epochs=2, verbose=0, callbacks=callbacks)
    assert (keras.ops.convert_to_numpy(local.kernel) == keras_dist.rank()).all()
    keras_dist.verify_replicas(model)
