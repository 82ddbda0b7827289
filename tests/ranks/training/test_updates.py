"""Updates by overridden methods and float8 layers, and the check that updates are reduced."""

import contextlib
import gc
import os

import keras
import numpy as np
import pytest
from renaming import rename
from small_training import BATCH, assert_close, distributed, make_data, make_model, weights_of
from test_optimizer import train_both, train_on_batches

import keras_dist
from keras_dist import errors
from keras_dist._compat import contract
from keras_dist.training import distributed as mixins

pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")

BACKEND = keras.backend.backend()


def signs(grads):
    return [grad if grad is None else keras.ops.sign(grad) for grad in grads]


class Surgery(keras.optimizers.SGD):
    """Applies signs of gradients, twice; the sign of a mean differs from the mean of signs."""

    def apply(self, grads, trainable_variables=None):
        for _ in range(2):
            super().apply(signs(grads), trainable_variables)


class Pairs(keras.optimizers.Adam):
    def apply_gradients(self, grads_and_vars):
        grads, variables = zip(*grads_and_vars, strict=True)
        return super().apply_gradients(zip(signs(grads), variables, strict=True))

    def apply(self, grads, trainable_variables=None):
        return super().apply(signs(grads), trainable_variables)


class Inside(keras.optimizers.SGD):
    def _backend_apply_gradients(self, grads, trainable_variables):
        self._backend_update_step(signs(grads), trainable_variables, self.learning_rate)


class Stateless(keras.optimizers.SGD):
    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        return super().stateless_apply(optimizer_variables, signs(grads), trainable_variables)


OWN = [Surgery, Pairs, Inside, *([Stateless] if BACKEND == "jax" else [])]


@on_each_backend
@pytest.mark.parametrize("kind", OWN)
def test_an_overridden_apply_receives_reduced_gradients(kind):
    ours, plain = train_both(lambda: kind(0.01), fit=train_on_batches)
    assert_close(weights_of(ours), weights_of(plain))


@on_each_backend
def test_an_overridden_apply_reduces_once_also_under_a_loss_scale(monkeypatch):
    calls = []
    reduced = keras_dist.training.gradient_reduction.GradientReduction.__call__

    def counted(self, *given):
        calls.append(self)
        return reduced(self, *given)

    monkeypatch.setattr(
        keras_dist.training.gradient_reduction.GradientReduction, "__call__", counted
    )
    x, y = make_data(BATCH, seed=keras_dist.rank())
    for wrap in (lambda one: one, keras.optimizers.LossScaleOptimizer):
        calls.clear()
        model = distributed(wrap(Surgery(0.01)), run_eagerly=True)
        model.train_on_batch(x, y)
        assert len(calls) == 1
        keras_dist.verify_replicas(model)


def value_of(weight):
    return np.array(keras.ops.convert_to_numpy(weight))


def by_hand(optimizer, variables, method):
    """Calls an optimizer as a custom loop does, with different gradients on each rank."""
    grads = [(keras_dist.rank() + 1.0) * keras.ops.ones_like(v.value) for v in variables]
    if method == "apply":
        optimizer.apply(grads, variables)
    elif method == "apply_gradients":
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        tf.function(lambda: optimizer.apply(grads, variables))()
    elif BACKEND == "jax":
        import jax

        optimizer.build(variables)
        values = [[v.value for v in some] for some in (optimizer.variables, variables)]
        jax.jit(optimizer.stateless_apply)(values[0], grads, values[1])


def assert_fails_on_several_ranks(call):
    if keras_dist.size() == 1:
        call()
        return
    with pytest.raises(Exception, match=r"\[rank \d.*Received: an update of '(?i:sgd)") as raised:
        call()
    is_staging_error = type(raised.value).__name__ == "StagingError"  # raised by tf.function
    assert is_staging_error or isinstance(raised.value, errors.BackendError)


HOOKS = ["_clip_gradients", "_clip_gradients and apply", "_backend_apply_gradients"]


@on_each_backend
@pytest.mark.parametrize("hook", HOOKS)
def test_an_update_without_reduction_is_an_error_in_the_same_step(monkeypatch, hook):
    contract.check("keras")  # cached from now on
    # Keras no longer calls the hook of keras_dist under the new name.
    for kind in (keras.optimizers.Optimizer, keras.optimizers.SGD):
        rename(monkeypatch, kind, hook.partition(" ")[0])
    if "apply" in hook.split():
        monkeypatch.delattr(mixins._Distributed, "apply")
    x, y = make_data(BATCH)
    for options in ({}, {"run_eagerly": True}):
        model = distributed(**options)
        assert_fails_on_several_ranks(lambda: model.train_on_batch(x, y))  # noqa: B023
    accumulates = distributed(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    assert_fails_on_several_ranks(lambda: [accumulates.train_on_batch(x, y) for _ in range(2)])
    for method in ("apply", "apply_gradients", *(["compiled"] if BACKEND != "torch" else [])):
        optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
        variables = make_model().trainable_variables
        assert_fails_on_several_ranks(lambda: by_hand(optimizer, variables, method))  # noqa: B023


@on_each_backend
def test_reduced_updates_of_a_custom_loop_pass():
    alone = keras_dist.add_process_set([0])
    mean, own = (keras_dist.size() + 1) / 2, keras_dist.rank() + 1
    for process_set, expected in ((None, mean), (alone, own)):
        for method in ("apply", "apply_gradients", "compiled"):
            wrapped = keras_dist.DistributedOptimizer(
                keras.optimizers.SGD(0.1), process_set=process_set
            )
            variables = make_model().trainable_variables
            before = value_of(variables[0])
            by_hand(wrapped, variables, method)
            if method != "compiled":  # on JAX it returns the values instead of assigning them
                moved = value_of(variables[0]) - before
                np.testing.assert_allclose(moved, -0.1 * expected, rtol=1e-4)
            wrapped.apply([], [])
    keras_dist.remove_process_set(alone)


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, Surgery])
def test_errors_of_keras_for_invalid_arguments_stay(kind):
    gradient, variable = keras.ops.ones(3), keras.Variable([0.0] * 3)
    plain, ours = kind(0.1), keras_dist.DistributedOptimizer(kind(0.1))
    for grads in [gradient], [gradient] * 2:  # first unbuilt, then built
        texts = []
        for optimizer in plain, ours:
            with pytest.raises(ValueError) as raised:
                optimizer.apply(grads)
            texts.append(str(raised.value))
            optimizer.build([variable])
        assert texts[0] == texts[1]
    for grads in [], [gradient] * 2:
        with contextlib.nullcontext() if not grads else pytest.raises(errors.ArgumentError):
            ours.apply(grads, [variable])


@pytest.mark.parametrize("passes", [pytest.param(None, marks=on_each_backend), 2])
def test_float8_trains_like_one_process_up_to_rounding(passes):
    def make(optimizer, **options):
        model = make_model(optimizer, **options)
        model.quantize("float8")
        model.compile(optimizer=model.optimizer, loss="sparse_categorical_crossentropy")
        return model

    def optimizer():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=passes)

    ours, plain = train_both(
        optimizer, make, eagerly=False
    )  # TensorFlow supports float8 in graphs only
    names = [weight.path.split("/")[-1] for weight in ours.weights]
    assert names.count("inputs_amax_history") == 2
    all_of = [[value_of(weight) for weight in model.weights] for model in (ours, plain, make(None))]
    for name, mine, wanted, begin in zip(names, *all_of, strict=True):
        if name in ("kernel", "bias"):
            moved, expected = mine - begin, wanted - begin
            assert np.linalg.norm(moved - expected) <= 0.1 * np.linalg.norm(expected)
    # The inputs of the first layer are the data, which is not rounded.
    first = names.index("inputs_amax_history")
    np.testing.assert_array_equal(all_of[0][first], all_of[1][first])


@on_each_backend
def test_a_single_gradient_that_overwrites_its_variable():
    variable = keras.Variable(np.zeros(3, "float32"))
    variable.overwrite_with_gradient = True
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.apply([keras.ops.full((3,), keras_dist.rank() + 1.0)], [variable])
    np.testing.assert_array_equal(value_of(variable), np.full(3, keras_dist.size(), "float32"))


# --- The memory of models that have ended


def shared_files():
    """Returns the numbers of descriptors and mappings of shared memory, and the bytes in them."""
    gc.collect()
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    opened = sum("/dev/shm" in os.readlink(link) for link in links if os.path.islink(link))
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if "/dev/shm" in line]
    return opened, len(spans), sum(int(end, 16) - int(start, 16) for start, end in spans)


def train_a_model():
    distributed().train_on_batch(*make_data(BATCH))


def train_variables():
    """Takes a compiled step of a custom loop."""
    weights = keras.Variable(np.ones(3, "float32"))
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([weights])
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.function(lambda: optimizer.apply([weights + 1.0], [weights]))()
    elif BACKEND == "jax":
        import jax

        step = jax.jit(lambda state, values: optimizer.stateless_apply(state, values, values)[0])
        jax.block_until_ready(step([v.value for v in optimizer.variables], [weights.value]))
    else:
        optimizer.apply([weights.value + 1.0], [weights])


def train_with_a_tape():
    import tensorflow as tf

    import keras_dist.tensorflow as hvd

    weights = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights**2)
    hvd.DistributedGradientTape(tape).gradient(loss, [weights])


WAYS = [train_a_model, train_variables, *[train_with_a_tape] * (BACKEND == "tensorflow")]


@on_each_backend
@pytest.mark.long
@pytest.mark.parity("the shared memory of a model is freed with it")
@pytest.mark.parametrize("train", WAYS)
def test_the_memory_of_a_model_is_freed_with_it(train):
    train()
    keras.utils.clear_session()
    before = shared_files()
    for _ in range(5):
        train()
        keras.utils.clear_session()
    # Less, if models of other tests end meanwhile.
    assert all(now <= then for now, then in zip(shared_files(), before, strict=True))
