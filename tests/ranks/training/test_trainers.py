"""Classes with Keras' trainer in them that are no `keras.Model` train as models do."""

import keras
import numpy as np
import pytest
from interrupting import Interrupt, Interrupted
from small_training import (
    BATCH,
    CLASSES,
    FEATURES,
    assert_close,
    compiled,
    global_data,
    rows_of_rank,
    weights_of,
)

import keras_dist
from keras_dist.callbacks import BackupAndRestore

pytestmark = pytest.mark.jobs("training", "jax-2")

Trainer = next(each for each in keras.Model.__mro__ if "make_train_function" in vars(each))


class Mixed(Trainer, keras.layers.Layer):
    """A layer mixed in with a trainer, as in Keras' own tests."""

    def __init__(self, is_built):
        keras.layers.Layer.__init__(self)
        Trainer.__init__(self)
        keras.utils.set_random_seed(1)
        self.hidden = keras.layers.Dense(8, "relu", activity_regularizer="l2")
        self.outputs_of_classes = keras.layers.Dense(CLASSES, "softmax")
        if is_built:
            self(np.zeros((1, FEATURES), "float32"))

    def call(self, x):
        return self.outputs_of_classes(self.hidden(x))


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def trained(model, data, batch, *callbacks):
    options = {"validation_data": global_data(), "shuffle": False, "verbose": 0}
    return model.fit(*data, batch, 2, callbacks=list(callbacks), **options).history


@pytest.mark.parity("a trainer that is no `keras.Model` trains like one process")
@pytest.mark.parametrize("is_built", [True, False])
def test_a_trainer_that_is_no_model_trains_like_one_process(is_built, shared_tmp_path):
    whole = global_data()
    own = [rows_of_rank(each, BATCH) for each in whole]
    alone = compiled(Mixed(is_built), sgd(), metrics=["accuracy"])
    expected = trained(alone, whole, BATCH * keras_dist.size())

    def made():
        optimizer = keras_dist.DistributedOptimizer(sgd())
        return compiled(Mixed(is_built), optimizer, metrics=["accuracy"])

    model = made()
    history = trained(model, own, BATCH, *keras_dist.callbacks())
    assert_close(weights_of(model), weights_of(alone))
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)
    keras_dist.verify_replicas(model)
    if is_built:
        backup = BackupAndRestore(shared_tmp_path / "backup", save_freq=1)
        with pytest.raises(Interrupted):
            trained(made(), own, BATCH, *keras_dist.callbacks(backup, Interrupt(1, 1)))
        resumed = made()
        trained(resumed, own, BATCH, *keras_dist.callbacks(backup))
        assert_close(weights_of(resumed), weights_of(model), 0)


def test_a_batch_trains_a_trainer_like_one_process():
    x, y = (each[: BATCH * keras_dist.size()] for each in global_data())
    own = rows_of_rank(x, BATCH), rows_of_rank(y, BATCH)
    alone, model = Mixed(True), Mixed(True)
    compiled(alone, sgd()).train_on_batch(x, y)
    compiled(model, keras_dist.DistributedOptimizer(sgd())).train_on_batch(*own)
    assert_close(weights_of(model), weights_of(alone))


class Marked(keras.Model):
    """A model without a `build`: that of Keras marks it as built, and makes no weights."""

    def __init__(self, **options):
        super().__init__(**options)
        keras.utils.set_random_seed(1)
        self.hidden = keras.layers.Dense(8, "relu")
        self.outputs_of_classes = keras.layers.Dense(CLASSES, "softmax")
        self.build((None, FEATURES))

    def call(self, x):
        return self.outputs_of_classes(self.hidden(x))


@pytest.mark.filterwarnings("ignore:.build")
def test_a_model_that_is_only_marked_as_built_trains_like_one_process(shared_tmp_path):
    whole = global_data()
    own = [rows_of_rank(each, BATCH) for each in whole]
    alone = compiled(Marked(), sgd())
    trained(alone, whole, BATCH * keras_dist.size())
    model = compiled(Marked(), keras_dist.DistributedOptimizer(sgd()))
    trained(model, own, BATCH, *keras_dist.callbacks(BackupAndRestore(shared_tmp_path / "backup")))
    assert_close(weights_of(model), weights_of(alone), 1e-5)
