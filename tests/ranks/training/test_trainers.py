"""Trainers that are no `keras.Model`, models that build late, and several optimizers in a step."""

import keras
import numpy as np
import pytest
from gans import Gan
from interrupting import Interrupt, Interrupted
from small_training import (
    BATCH,
    CLASSES,
    EAGER,
    FEATURES,
    STEPS,
    agreed,
    assert_close,
    compiled,
    fit_rows,
    global_data,
    rows_of_rank,
    weights_of,
)

import keras_dist
from keras_dist.callbacks import BackupAndRestore

pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")

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


@on_each_backend
@pytest.mark.long
@pytest.mark.parity("a trainer that is no `keras.Model` trains like one process")
@pytest.mark.parametrize("is_built", [True, False])
def test_a_trainer_that_is_no_model_trains_like_one_process(is_built):
    whole = global_data()
    own = [rows_of_rank(each, BATCH) for each in whole]
    alone = compiled(Mixed(is_built), sgd(), metrics=["accuracy"], **EAGER)
    expected = trained(alone, whole, BATCH * keras_dist.size())
    optimizer = keras_dist.DistributedOptimizer(sgd())
    model = compiled(Mixed(is_built), optimizer, metrics=["accuracy"])
    history = trained(model, own, BATCH, *keras_dist.callbacks())
    assert_close(weights_of(model), weights_of(alone))
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)
    keras_dist.verify_replicas(model)


def test_a_trainer_that_is_no_model_resumes(shared_tmp_path):
    own = [rows_of_rank(each, BATCH) for each in global_data()]
    backup = BackupAndRestore(shared_tmp_path / "backup", save_freq=1)
    expected, interrupted, resumed = (
        compiled(Mixed(True), keras_dist.DistributedOptimizer(sgd())) for _ in range(3)
    )
    trained(expected, own, BATCH, *keras_dist.callbacks())
    with pytest.raises(Interrupted):
        trained(interrupted, own, BATCH, *keras_dist.callbacks(backup, Interrupt(1, 1)))
    trained(resumed, own, BATCH, *keras_dist.callbacks(backup))
    assert_close(weights_of(resumed), weights_of(expected), 0)


@on_each_backend
def test_a_batch_trains_a_trainer_like_one_process():
    x, y = (each[: BATCH * keras_dist.size()] for each in global_data())
    own = rows_of_rank(x, BATCH), rows_of_rank(y, BATCH)
    alone, model = Mixed(True), Mixed(True)
    compiled(alone, sgd(), **EAGER).train_on_batch(x, y)
    compiled(model, keras_dist.DistributedOptimizer(sgd())).train_on_batch(*own)
    assert_close(weights_of(model), weights_of(alone))


class Late(keras.Model):
    """A model without a `build`: that of Keras marks it as built, and makes no weights."""

    def __init__(self, is_marked):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.hidden = keras.layers.Dense(8, "relu")
        self.outputs_of_classes = keras.layers.Dense(CLASSES, "softmax")
        if is_marked:
            self.build((None, FEATURES))

    def call(self, x):
        return self.outputs_of_classes(self.hidden(x))


@on_each_backend
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.build")
@pytest.mark.parity("a subclassed model that is not built")
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_model_that_is_not_built_trains_like_one_process(is_marked, shared_tmp_path):
    whole = global_data()
    own = [rows_of_rank(each, BATCH) for each in whole]
    alone = compiled(Late(is_marked), sgd(), **EAGER)
    trained(alone, whole, BATCH * keras_dist.size())
    model = compiled(Late(is_marked), keras_dist.DistributedOptimizer(sgd()))
    further = [BackupAndRestore(shared_tmp_path / "backup")] if is_marked else []
    trained(model, own, BATCH, *keras_dist.callbacks(*further))
    assert_close(weights_of(model), weights_of(alone), 1e-5)


# --- Several optimizers


@on_each_backend
@pytest.mark.parity("two optimizers in one `train_step`, as in a GAN")
def test_two_optimizers_in_one_train_step():
    n = keras_dist.size()
    real, _ = global_data()
    noise = np.random.default_rng(2).standard_normal((len(real), 2)).astype("float32")
    plain, model = Gan(), Gan(keras_dist.DistributedOptimizer)
    plain.run_eagerly = EAGER["run_eagerly"]
    plain.fit(real, noise, batch_size=BATCH * n, shuffle=False, verbose=0)
    fit_rows(model, rows_of_rank(real, BATCH), rows_of_rank(noise, BATCH))
    assert agreed([weight.tobytes() for weight in weights_of(model)])
    assert agreed([np.array(v).tobytes() for v in model.judging.variables])
    assert int(model.judging.iterations) == int(model.optimizer.iterations) == STEPS
    assert_close(weights_of(model), weights_of(plain))


@on_each_backend
def test_each_of_two_optimizers_under_a_loss_scale_skips_its_own_steps():
    n = keras_dist.size()
    real, _ = global_data()
    real[BATCH * n - 1] = np.inf  # first step, last rank
    noise = np.random.default_rng(2).standard_normal((len(real), 2)).astype("float32")

    def scaled(optimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer, 1.0)

    plain, model = Gan(scaled), Gan(lambda one: scaled(keras_dist.DistributedOptimizer(one)))
    plain.run_eagerly = EAGER["run_eagerly"]
    plain.fit(real, noise, batch_size=BATCH * n, shuffle=False, verbose=0)
    fit_rows(model, rows_of_rank(real, BATCH), rows_of_rank(noise, BATCH))
    keras_dist.verify_replicas(model)
    for one in (plain, model):  # only the discriminator's loss overflows
        assert (int(one.judging.iterations), int(one.optimizer.iterations)) == (STEPS - 1, STEPS)
    assert_close(weights_of(model), weights_of(plain))
