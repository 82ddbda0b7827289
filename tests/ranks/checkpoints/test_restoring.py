"""Training resumes with optimizers that are built late, and with the same random numbers."""

import keras
import numpy as np
import pytest
from gans import TwoOptimizers
from interrupting import Interrupt, Interrupted, everything_of
from small_training import make_data

import keras_dist
from keras_dist.callbacks import BackupAndRestore
from keras_dist.training import random_generators

pytestmark = pytest.mark.jobs("hooks")

BACKEND = keras.backend.backend()
Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD


@pytest.fixture
def directory(shared_tmp_path):
    """A directory for the backup, which is removed at the end of training."""
    return shared_tmp_path / "backup"


def new_gan(judging=None, making=None, patience=0):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = TwoOptimizers(patience)
    optimizers = judging or Adam(0.01), making or SGD(0.1, momentum=0.9)
    model.compile(*map(keras_dist.DistributedOptimizer, optimizers), run_eagerly=patience > 0)
    return model


def train(model, *callbacks):
    real, _ = make_data(12, seed=keras_dist.rank())
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, "epochs": 3}
    model.fit(real, callbacks=keras_dist.callbacks(*callbacks), **options)
    keras_dist.verify_replicas(model)
    return everything_of(model)


def interrupt(model, directory, epoch, batch=None, **options):
    with pytest.raises(Interrupted):
        train(model, BackupAndRestore(directory, **options), Interrupt(epoch, batch))
    keras_dist.barrier()


@pytest.mark.jobs("jax-2")
@pytest.mark.parity("`BackupAndRestore` with two optimizers, built at their first steps")
def test_optimizers_that_are_not_built_when_training_resumes(directory):
    expected = train(new_gan())
    interrupt(new_gan(), directory, 1)
    interrupt(new_gan(), directory, 2, batch=1, save_freq=1)
    model = new_gan()
    assert train(model, BackupAndRestore(directory)) == expected
    assert int(model.d_optimizer.iterations) == int(model.g_optimizer.iterations) == 9


@pytest.mark.skipif(BACKEND == "jax", reason="JAX takes optimizers that are built alone")
def test_only_one_optimizer_has_made_a_step_when_the_backup_is_written(directory):
    def gan():
        scaled = keras.optimizers.LossScaleOptimizer(Adam(0.01), 8.0)
        return new_gan(scaled, keras.optimizers.Adagrad(0.1), patience=4)

    expected = train(gan())
    interrupted, built = gan(), gan()
    interrupt(interrupted, directory, 1, batch=2)  # after two steps of the second
    built.g_optimizer.build(built.maker.trainable_variables)
    for model in (gan(), built, interrupted):
        with pytest.raises(Interrupted):
            train(model, BackupAndRestore(directory, save_freq=100), Interrupt(2))
        keras_dist.barrier()
        assert int(model.g_optimizer.iterations) == 2
    assert train(built, BackupAndRestore(directory)) == expected


@pytest.mark.skipif(BACKEND == "jax", reason="JAX takes optimizers that are built alone")
def test_optimizers_that_one_rank_has_built_are_built_on_all():
    model = new_gan()
    if keras_dist.rank() == keras_dist.size() - 1:
        model.d_optimizer.build(model.judge.trainable_variables)
    assert train(model) == train(new_gan())


def test_an_elastic_state_of_optimizers_that_are_built_after_it(directory):
    model = new_gan()
    state = keras_dist.elastic.KerasState(model, directory=directory)
    start = model.get_weights()
    expected = train(model)
    state.restore()
    assert all((a == b).all() for a, b in zip(start, model.get_weights(), strict=True))
    assert all(int(one.iterations) == 0 for one in (model.d_optimizer, model.g_optimizer))
    assert not any(np.any(one) for one in model.g_optimizer.momentums)
    assert train(model) != expected  # its dropout has advanced
    state.save()
    expected = everything_of(model)
    keras_dist.barrier()
    fresh = new_gan()
    keras_dist.elastic.KerasState(fresh, directory=directory).sync()
    assert everything_of(fresh) == expected


def test_the_generator_that_keras_shares_goes_on():
    def draw():
        return keras.ops.convert_to_numpy(keras.random.uniform((2,))).tolist()

    keras.utils.set_random_seed(1)
    draw()
    states = random_generators.states()
    expected = draw()
    random_generators.restore(states)
    assert draw() == expected
