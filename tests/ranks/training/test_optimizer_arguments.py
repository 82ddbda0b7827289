"""Arguments of `DistributedOptimizer`: the weights equal those of one process on all data."""

import contextlib

import keras
import numpy as np
import pytest
from small_training import (
    BATCH,
    STEPS,
    assert_close,
    compiled,
    fit_rows,
    global_data,
    make_data,
    make_model,
    rows_of_rank,
    weights_of,
)

import keras_dist
from keras_dist import _engine, _gpu, errors

pytestmark = pytest.mark.jobs("training")

BACKEND = keras.backend.backend()
POWER_OF_TWO = [1, 2, 4, 8]


def train(make_optimizer, make=make_model, **options):
    """Returns a model trained on this rank's rows with a distributed optimizer."""
    x, y = global_data()
    model = make(optimizer=keras_dist.DistributedOptimizer(make_optimizer(), **options))
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    return model


def train_plain(optimizer):
    """Returns a model trained on the rows of all ranks with plain Keras."""
    x, y = global_data()
    model = make_model(optimizer=optimizer)
    model.fit(x, y, batch_size=BATCH * keras_dist.size(), shuffle=False, verbose=0)
    return model


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)


def adam():
    return keras.optimizers.Adam(0.01)


@contextlib.contextmanager
def counting(monkeypatch):
    """Counts the reductions of gradients on this rank."""
    calls = []
    original = _engine.FusedAllreduce.reduce_bucket

    def counted(self, number, *arguments):
        if self.call.operation == "the reduction of gradients":
            calls.append(number)
        return original(self, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_engine.FusedAllreduce, "reduce_bucket", counted)
        yield calls


# --- backward_passes_per_step


@pytest.mark.jobs("jax-2")
@pytest.mark.parity("`backward_passes_per_step`")
def test_averaged_passes_equal_gradient_accumulation_of_keras(monkeypatch):
    with counting(monkeypatch) as calls:
        model = train(sgd, backward_passes_per_step=3, average_aggregated_gradients=True)
    own = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05, gradient_accumulation_steps=3)
    assert_close(weights_of(model), weights_of(train_plain(own)))
    assert int(model.optimizer.iterations) == STEPS // 3
    if keras_dist.size() > 1:
        assert len(calls) == STEPS // 3


def apply(optimizer, *steps):
    """Applies steps to variables of zeros and returns their values."""
    variables = [keras.Variable(np.zeros_like(gradient)) for gradient in steps[0]]
    optimizer.build(variables)
    for gradients in steps:
        tensors = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
        if BACKEND == "jax":  # LossScaleOptimizer supports only stateless_apply on JAX
            state = [v.value for v in optimizer.variables], tensors, [v.value for v in variables]
            values, state = optimizer.stateless_apply(*state)
            for variable, value in zip(
                variables + optimizer.variables, values + state, strict=True
            ):
                variable.assign(value)
        else:
            optimizer.apply(tensors, variables)
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_passes_are_averaged_or_summed(monkeypatch, scale, average):
    inner = keras.optimizers.SGD(1.0)
    optimizer = inner if scale is None else keras.optimizers.LossScaleOptimizer(inner, scale)
    wrapped = keras_dist.DistributedOptimizer(
        optimizer, backward_passes_per_step=2, average_aggregated_gradients=average
    )
    mine = np.float32(keras_dist.rank() * (scale or 1))
    with counting(monkeypatch) as calls:
        (value,) = apply(wrapped, *[[mine * np.ones(3, "float32")]] * 5)  # two steps and a half
    assert len(calls) == (2 if keras_dist.size() > 1 else 0)
    mean = (keras_dist.size() - 1) / 2
    np.testing.assert_array_equal(value, np.full(3, -2 * mean * (1 if average else 2)))
    assert int(inner.iterations) == 2


def test_a_loss_scale_around_a_distributed_optimizer_skips_on_all_ranks():
    n, rank = keras_dist.size(), keras_dist.rank()
    inner = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer = keras.optimizers.LossScaleOptimizer(inner, 1.0)
    mine = np.full(2, rank + 1, "float32")
    overflown = mine * (np.inf if rank == n - 1 else 1)
    (value,) = apply(optimizer, [mine], [overflown], [10 * mine])
    assert float(optimizer.dynamic_scale) == 0.5
    assert int(inner.iterations) == 2
    np.testing.assert_allclose(value, np.full(2, -(1 + 10 / 0.5) * (n + 1) / 2))


def test_an_overflow_in_one_step_does_not_reach_the_next():
    wrapped = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    variable = keras.Variable(np.zeros(2, "float32"))
    wrapped.build([variable])
    for value in (np.inf, 1.0, keras_dist.rank(), 2.0):
        if value == keras_dist.rank():
            variable.assign(np.zeros(2, "float32"))
        gradient = keras.ops.convert_to_tensor(np.full(2, value, "float32"))
        wrapped.apply([gradient], [variable])
    mean = (keras_dist.size() - 1) / 2
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -(mean + 2))


@pytest.mark.jobs("jax-2")
@pytest.mark.parity("`mixed_float16` with several passes: reduces in updates only")
def test_passes_under_a_loss_scale_reduce_in_updates_only(monkeypatch):
    n = keras_dist.size()
    x, y = global_data()
    x[3 * BATCH * n - 1] = 1e30  # the last sample of the third pass, on the last rank

    def made(wrap):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = make_model(wrap(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)))
        finally:
            keras.config.set_dtype_policy("float32")
        model.optimizer.initial_scale = 8.0  # no other gradient overflows at this scale
        return model

    plain = made(lambda optimizer: optimizer)
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    model = made(keras_dist.DistributedOptimizer)
    with counting(monkeypatch) as calls:
        fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    scaled = model.optimizer
    assert int(scaled.iterations) == int(plain.optimizer.iterations) == (STEPS - 1) // 2
    assert float(scaled.dynamic_scale) == float(plain.optimizer.dynamic_scale) == 4.0
    assert len(calls) == ((STEPS - 1) // 2 if n > 1 else 0)
    starts = weights_of(make_model())
    assert_close(
        [weight - start for weight, start in zip(weights_of(model), starts, strict=True)],
        [weight - start for weight, start in zip(weights_of(plain), starts, strict=True)],
        relative=0.02,
    )


def test_passes_of_a_saved_optimizer_are_restored():
    wrapped = keras_dist.DistributedOptimizer(sgd(), backward_passes_per_step=2)
    loaded = keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))
    keras_dist.DistributedOptimizer(loaded, backward_passes_per_step=2)
    assert loaded.gradient_accumulation_steps == 2


# --- gradient_predivide_factor and groups


def test_predividing_keeps_a_sum_from_overflowing():
    if keras_dist.size() == 1:
        pytest.skip("one rank sums nothing")
    huge = np.float32(3e38)
    # NCCL multiplies contributions by the product of both factors.
    by_nccl = _gpu.counts_host_memory()
    overflow = -huge if by_nccl else -np.inf
    for factor, expected in [(float(keras_dist.size()), -huge), (0.5, overflow)]:
        optimizer = keras.optimizers.SGD(1.0)
        keras_dist.DistributedOptimizer(optimizer, gradient_predivide_factor=factor)
        (value,) = apply(optimizer, [np.full(2, huge)])
        np.testing.assert_allclose(value, [expected, expected], rtol=1e-6)


def test_a_predivided_average_is_the_average():
    optimizer = keras.optimizers.SGD(1.0)
    keras_dist.DistributedOptimizer(optimizer, gradient_predivide_factor=3.0)
    (value,) = apply(optimizer, [np.full(2, 1 + keras_dist.rank(), "float32")])
    np.testing.assert_allclose(value, np.full(2, -(1 + keras_dist.size()) / 2), rtol=1e-6)


@pytest.mark.jobs("jax-2")
@pytest.mark.parity("`groups`")
def test_groups_change_buckets_but_no_bit(monkeypatch):
    rng = np.random.default_rng(keras_dist.rank())
    gradients = [rng.standard_normal(7).astype("float32") for _ in range(4)]
    found = {}
    for label, buckets in [("none", 1), (1, 1), (3, 3), (9, 4), ("lists", 2)]:
        variables = [keras.Variable(np.zeros(7, "float32")) for _ in gradients]
        # The first with the last; others are grouped by size.
        lists = [[variables[0], variables[3]]]
        groups = {"none": None, "lists": lists}.get(label, label)
        optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=groups)
        optimizer.build(variables)
        with counting(monkeypatch) as calls:
            tensors = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
            optimizer.apply(tensors, variables)
        found[label] = [keras.ops.convert_to_numpy(variable).tobytes() for variable in variables]
        if keras_dist.size() > 1:
            assert len(calls) == buckets
    assert len({tuple(values) for values in found.values()}) == 1


# --- sparse_as_dense, Adasum


def embedding_model(optimizer=None):
    keras.utils.set_random_seed(1)
    words = keras.Input((4,), dtype="int32")
    vectors = keras.layers.Embedding(50, 8, name="table")(words)
    output = keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(vectors))
    return compiled(keras.Model(words, output), optimizer)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow gives rows by itself")
def test_rows_of_an_embedding_become_dense():
    n = keras_dist.size()
    rng = np.random.default_rng(3)
    x = rng.integers(0, 20, (STEPS * BATCH * n, 4))
    y = rng.integers(0, 3, len(x))
    seen = []

    class Watched(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            seen.extend(type(grad).__name__ for grad in grads)
            return super()._clip_gradients(grads)

    wrapped = keras_dist.DistributedOptimizer(Watched(0.1), sparse_as_dense=True)
    model = embedding_model(wrapped)
    fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    plain = embedding_model(keras.optimizers.SGD(0.1))
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    assert seen
    assert "IndexedSlices" not in seen
    assert_close(weights_of(model), weights_of(plain))


@pytest.mark.jobs("jax-2")
@pytest.mark.parity("Adasum")
def test_adasum_sums_orthogonal_and_averages_parallel_gradients():
    n, rank = keras_dist.size(), keras_dist.rank()
    if n not in POWER_OF_TWO:
        with pytest.raises(errors.ArgumentError, match="power of two"):
            keras_dist.DistributedOptimizer(sgd(), op="Adasum")
        return
    common, own = np.ones(n, "float32"), np.eye(n, dtype="float32")[rank]
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), op="Adasum")
    for value in apply(optimizer, [common, own]):
        np.testing.assert_allclose(value, -common, rtol=1e-6)


def test_adasum_of_an_embedding():
    if keras_dist.size() not in POWER_OF_TWO:
        pytest.skip("Adasum requires a power of two of ranks")
    model = embedding_model(keras_dist.DistributedOptimizer(adam(), op=keras_dist.Adasum))
    rng = np.random.default_rng(keras_dist.rank())
    fit_rows(model, rng.integers(0, 20, (BATCH, 4)), rng.integers(0, 3, BATCH))
    keras_dist.verify_replicas(model)
    assert all(np.isfinite(weight).all() for weight in weights_of(model))


# --- Local variables


@pytest.mark.jobs("jax-2")
@pytest.mark.parity("local variables keep their own gradients")
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("kind", ["variables", "layers"])
@pytest.mark.parametrize("passes", [1, 2])
def test_local_variables_stay_local(passes, kind, scale):
    n, rank = keras_dist.size(), keras_dist.rank()
    model = make_model()
    layer = model.layers[0]
    options = {"scale_local_gradients": scale, "backward_passes_per_step": passes}
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if kind == "layers":
        keras_dist.PartialDistributedOptimizer(optimizer, local_layers=layer, **options)
    else:
        keras_dist.DistributedOptimizer(optimizer, **options)
        for variable in layer.trainable_variables:
            optimizer.register_local_var(variable)
    optimizer.build(model.trainable_variables)
    before = weights_of(model)
    for factor in range(1, passes + 1):
        mine = float(factor * (rank + 1))
        gradients = [keras.ops.ones(v.shape) * mine for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
    assert int(optimizer.iterations) == 1
    total = 0.1 * sum(range(1, passes + 1))
    local = total * (rank + 1) / (n if scale else 1)
    shared = total * (n + 1) / 2
    expected = [local, local, shared, shared]
    for weight, old, step in zip(weights_of(model), before, expected, strict=True):
        np.testing.assert_allclose(weight, old - np.float32(step), rtol=1e-5, atol=1e-6)
    compiled(model, optimizer)
    keras_dist.verify_replicas(model)


@pytest.mark.parametrize("count", [0, 2])
def test_no_layer_or_all_of_them_may_be_local(count):
    n, rank = keras_dist.size(), keras_dist.rank()
    model = make_model()
    layers = model.layers[:count]
    optimizer = keras.optimizers.SGD(1.0)
    keras_dist.PartialDistributedOptimizer(optimizer, local_layers=layers)
    optimizer.build(model.trainable_variables)
    before = weights_of(model)
    gradients = [keras.ops.ones(v.shape) * float(rank + 1) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    step = (rank + 1) / n if count else (n + 1) / 2
    for weight, old in zip(weights_of(model), before, strict=True):
        np.testing.assert_allclose(weight, old - np.float32(step), rtol=1e-5, atol=1e-6)


def test_local_variables_survive_a_fit():
    model = make_model()
    layer = model.layers[0]
    optimizer = keras_dist.PartialDistributedOptimizer(adam(), local_layers=[layer])
    compiled(model, optimizer)
    layer.kernel.assign(layer.kernel + keras_dist.rank())
    x, y = make_data(8, seed=keras_dist.rank())
    callbacks = keras_dist.callbacks()
    for callback in callbacks:
        if isinstance(callback, keras_dist.callbacks.BroadcastGlobalVariablesCallback):
            callback.local_variables.extend(layer.trainable_variables)
    for _ in range(2):
        model.fit(x, y, verbose=0, callbacks=callbacks)
        keras_dist.verify_replicas(model)
    kernels = keras_dist.allgather_object(np.array(layer.kernel).tobytes())
    assert len(set(kernels)) == keras_dist.size()


# --- Other arguments; what cannot be passed is in `test_error_texts`


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="an earlier Keras")
def test_passes_require_a_single_optimizer():
    optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd()))
    with pytest.raises(errors.ArgumentError, match="steps of the optimizers inside"):
        keras_dist.DistributedOptimizer(optimizer, backward_passes_per_step=2)


def test_deprecated_arguments_are_accepted():
    old = {"name": "Distributed", "device_dense": "/gpu:0", "device_sparse": "/cpu:0"}
    with pytest.warns(DeprecationWarning, match="pass groups"):
        optimizer = keras_dist.DistributedOptimizer(sgd(), num_groups=2, **old)
    assert optimizer._keras_dist.options.groups == 2
