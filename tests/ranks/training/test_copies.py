"""Copies of a distributed optimizer, by any of Keras' ways, reduce as the original does."""

import copy
import pickle
import warnings

import keras
import numpy as np
import pytest
from small_training import (
    CLASSES,
    EAGER,
    FEATURES,
    compiled,
    distributed,
    fit_rows,
    make_data,
    make_model,
)

import keras_dist
from keras_dist import errors

# What copies have is the same on every backend: on others run what docs/backends.md shows.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")


@keras.saving.register_keras_serializable("test_copies")
class Doubling(keras.optimizers.SGD):
    """Applies twice the gradient; of the backend's own class on torch."""

    def apply(self, grads, trainable_variables=None):
        super().apply([2 * grad for grad in grads], trainable_variables)


def sgd():
    return keras.optimizers.SGD(0.1)


def line(optimizer, **options):
    """A model with one weight, 0."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="line")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(optimizer, "mse", **{**EAGER, **options})
    return model


def step(model):
    """Makes a step where the targets are 1 on rank 0, 3 on rank 1 and so on; returns the weight.

    The gradient of a rank is -2 times its target, and the average target is the number of ranks.
    """
    x, y = np.ones((4, 1), "float32"), np.full((4, 1), 1 + 2 * keras_dist.rank(), "float32")
    model.train_on_batch(x, y)
    weights = keras_dist.allgather_object(float(model.get_weights()[0][0, 0]))
    assert len(set(weights)) == 1, weights
    return weights[0]


def reloaded(model, path):
    model.save(path / "model.keras")
    return keras.saving.load_model(path / "model.keras")


def recompiled(model, copied):
    clone = keras.Sequential.from_config(model.get_config())
    clone.compile(copied, "mse", **EAGER)
    return clone


def cloned(model):
    clone = keras.Sequential.from_config(model.get_config())
    clone.compile_from_config(model.get_compile_config())
    return clone


def serialized(optimizer):
    """As KerasTuner copies the optimizer that a tuner was given, for each trial."""
    return keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))


def changed(optimizer):
    """As searches do that set a parameter of a trial."""
    config = {**optimizer.get_config(), "name": "another"}
    return type(optimizer).from_config(copy.deepcopy(config))


WAYS = {
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "copy": lambda model, path: copy.copy(model),
    "pickle": lambda model, path: pickle.loads(pickle.dumps(model)),
    "a clone of a pickle": lambda model, path: keras.models.clone_model(
        pickle.loads(pickle.dumps(model))
    ),
    "compile_from_config": lambda model, path: cloned(model),
    "save and load": reloaded,
    "from_config": lambda model, path: recompiled(model, changed(model.optimizer)),
    "serialize": lambda model, path: recompiled(model, serialized(model.optimizer)),
    "a deepcopy of the optimizer": lambda model, path: recompiled(
        model, copy.deepcopy(model.optimizer)
    ),
    "a copy of the optimizer": lambda model, path: recompiled(model, copy.copy(model.optimizer)),
}


@on_each_backend
@pytest.mark.parity("copies, pickles and clones of a model reduce as the original does")
@pytest.mark.parity("the sum of gradients instead of their average")
@pytest.mark.parametrize("way", WAYS)
def test_copies_reduce_with_the_same_options(way, tmp_path):
    n = keras_dist.size()
    model = line(keras_dist.DistributedOptimizer(sgd(), op="sum", scale_local_gradients=False))
    copied = WAYS[way](model, tmp_path)
    assert step(copied) == pytest.approx(0.2 * n * n)
    assert copied.optimizer._keras_dist.options.scale_local is False
    if copied.optimizer is not model.optimizer:
        assert step(model) == pytest.approx(0.2 * n * n)
    if way == "from_config":  # in turns
        for each in (copied, model):
            assert step(each) == pytest.approx(0.2 * n * n * (2 - 0.2 * n))


def inside(make):
    return lambda: keras_dist.DistributedOptimizer(make())


OPTIMIZERS = {
    "a loss scale outside": inside(lambda: keras.optimizers.LossScaleOptimizer(sgd(), 8.0)),
    "a loss scale around it": lambda: keras.optimizers.LossScaleOptimizer(
        keras_dist.DistributedOptimizer(sgd()), 8.0
    ),
    "accumulation under a loss scale": inside(
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), 8.0
        )
    ),
    "a class of the user": inside(lambda: Doubling(0.05)),
    "slices": lambda: keras_dist.DistributedOptimizer(sgd(), shard_state=True),
    "passes": lambda: keras_dist.DistributedOptimizer(sgd(), backward_passes_per_step=2),
}

if hasattr(keras.optimizers, "MultiOptimizer"):
    OPTIMIZERS["several"] = inside(
        lambda: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd()))
    )


@pytest.mark.parametrize("way", ["deepcopy", "compile_from_config", "serialize"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_copies_of_other_optimizers(kind, way, tmp_path):
    model = line(OPTIMIZERS[kind]())
    passes = 2 if kind in ("passes", "accumulation under a loss scale") else 1
    copied = WAYS[way](model, tmp_path)
    for _ in range(passes - 1):
        assert step(copied) == 0
    factor = 2 if kind == "passes" else 1  # which are summed
    assert step(copied) == pytest.approx(0.2 * keras_dist.size() * factor)


def test_the_optimizer_that_compile_wraps_in_a_loss_scale_is_copied():
    """Under mixed_float16, also after the original has trained; and compiled anew."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras_dist.DistributedOptimizer(sgd())
        model = line(optimizer)
        for _ in range(12):  # overflows, then steps
            trained = step(model)
        assert trained != 0
        for copied in (keras.models.clone_model(model), recompiled(model, serialized(optimizer))):
            copied.set_weights([np.zeros((1, 1))])
            assert [step(copied) for _ in range(12)][-1] == trained
    finally:
        keras.config.set_dtype_policy(before)


def test_variables_and_layers_of_the_options_are_found_in_the_copy(tmp_path):
    model = make_model()
    hidden, output = model.layers
    optimizer = keras_dist.PartialDistributedOptimizer(
        sgd(), local_layers=hidden, groups=[[output.bias]]
    )
    optimizer.register_local_var(output.kernel)
    compiled(model, optimizer)
    model.save(tmp_path / "model.keras")
    loaded = keras_dist.load_model(tmp_path / "model.keras")
    for clone in (keras.models.clone_model(model), copy.deepcopy(model), loaded):
        clone.train_on_batch(*make_data(8))
        mine = clone.optimizer._keras_dist
        hidden, output = clone.layers
        assert mine.local_layers == (hidden,)
        assert [variable is output.kernel for variable in mine.registered] == [True]
        assert mine.options.groups[0][0] is output.bias
    without = keras_dist.load_model(tmp_path / "model.keras", groups=None)
    assert without.optimizer._keras_dist.options.groups == ()


def test_a_copy_in_a_loop_of_its_own():
    n = keras_dist.size()
    variables = [keras.Variable(np.zeros(2, "float32")) for _ in range(2)]
    original = keras_dist.DistributedOptimizer(sgd())
    original.build(variables)
    copied = serialized(original)
    gradients = [keras.ops.full((2,), float(keras_dist.rank()))] * 2
    copied.apply(gradients, variables)
    np.testing.assert_allclose(variables[0], np.full(2, -0.1 * (n - 1) / 2), rtol=1e-6)
    local = serialized(keras_dist.DistributedOptimizer(sgd(), scale_local_gradients=False))
    local.register_local_var(variables[1])
    local.apply(gradients, variables)
    expected = -0.1 * (n - 1) / 2 - 0.1 * keras_dist.rank()
    np.testing.assert_allclose(variables[1], np.full(2, expected), rtol=1e-6)


def test_a_copy_whose_options_cannot_be_restored_does_not_train():
    if keras_dist.size() == 1:
        return
    everyone = keras_dist.add_process_set(list(range(keras_dist.size() - 1)))
    model = line(keras_dist.DistributedOptimizer(sgd(), process_set=everyone))
    copied = copy.deepcopy(model)
    keras_dist.remove_process_set(everyone)
    with pytest.raises(errors.ArgumentError, match="a process set of rank"):
        copied.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=keras_dist.callbacks())
    assert copied.get_weights()[0][0, 0] == 0
    copied.compile(keras_dist.DistributedOptimizer(copied.optimizer, process_set=None), "mse")
    assert step(copied) == pytest.approx(0.2 * keras_dist.size())


def test_a_deep_copy_is_distributed_at_once_and_a_pickle_may_be_wrapped_anew():
    wrapped = keras_dist.DistributedOptimizer(sgd(), op="sum", backward_passes_per_step=2)
    copied = copy.deepcopy(wrapped)
    assert copied is not wrapped
    assert copied.get_config() == wrapped.get_config()
    with pytest.raises(errors.ArgumentError, match="not distributed yet"):
        keras_dist.DistributedOptimizer(copied)
    for loaded in (pickle.loads(pickle.dumps(wrapped)), serialized(wrapped)):
        assert loaded.get_config() == wrapped.get_config()
        again = keras_dist.DistributedOptimizer(loaded, backward_passes_per_step=2)
        assert again._keras_dist.options.op is keras_dist.Average
        assert again.gradient_accumulation_steps == 2


# --- A missing wrapper


@on_each_backend
@pytest.mark.parity("training by the gradients of one rank alone is refused before it begins")
def test_callbacks_refuse_an_optimizer_that_is_not_wrapped():
    x, y = make_data(8)
    plain = make_model(**EAGER)
    begin = plain.get_weights()
    if keras_dist.size() == 1:
        fit_rows(plain, x, y)
        return
    with pytest.raises(errors.UsageError, match=r"to be distributed. Received: a plain SGD"):
        fit_rows(plain, x, y)
    for weight, before in zip(plain.get_weights(), begin, strict=True):
        np.testing.assert_array_equal(weight, before)
    alike = distributed() if keras_dist.rank() == 0 else plain
    with pytest.raises(errors.MismatchError, match=r"\[rank 1 of .*a plain one, while"):
        fit_rows(alike, x, y)
    if keras_dist.rank() == 0:  # without the callbacks, of each rank alone
        plain.fit(x, y, verbose=0)


class OwnStep(keras.Model):
    """May average its gradients itself."""

    def train_step(self, *arguments):
        return super().train_step(*arguments)


def test_callbacks_warn_of_a_plain_optimizer_with_a_train_step_of_the_user():
    x, y = make_data(8)
    inputs = keras.Input((FEATURES,))
    model = OwnStep(inputs, keras.layers.Dense(CLASSES, activation="softmax")(inputs))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_rows(compiled(model), x, y)
    texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
    if keras_dist.size() > 1 and keras_dist.rank() == 0:
        plain, same_batches = texts
        assert "to be distributed. Received: a plain SGD" in plain
        assert "a different first batch on each rank" in same_batches
    else:
        assert not texts
