"""Arguments of `DistributedOptimizer`: the weights equal those of one process on all data."""

import contextlib

import keras
import numpy as np
import pytest
from small_training import (
    BATCH,
    EAGER,
    STEPS,
    assert_close,
    compiled,
    fit_rows,
    global_data,
    make_model,
    rows_of_rank,
    weights_of,
)

import keras_dist
from keras_dist import _engine, _gpu, errors

pytestmark = pytest.mark.jobs("hooks")

BACKEND = keras.backend.backend()


def sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05, **options)


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


@pytest.mark.long
@pytest.mark.jobs("jax-2")
@pytest.mark.parity("`backward_passes_per_step`")
def test_averaged_passes_equal_gradient_accumulation_of_keras(monkeypatch):
    x, y = global_data()
    options = {"backward_passes_per_step": 3, "average_aggregated_gradients": True}
    model = make_model(keras_dist.DistributedOptimizer(sgd(), **options))
    with counting(monkeypatch) as calls:
        fit_rows(model, rows_of_rank(x, BATCH), rows_of_rank(y, BATCH))
    keras_dist.verify_replicas(model)
    plain = make_model(sgd(gradient_accumulation_steps=3), **EAGER)
    plain.fit(x, y, batch_size=BATCH * keras_dist.size(), shuffle=False, verbose=0)
    assert_close(weights_of(model), weights_of(plain))
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


@pytest.mark.long
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
    plain.run_eagerly = EAGER["run_eagerly"]
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


# --- gradient_predivide_factor and groups


@pytest.mark.jobs("training-double-torch-2")
def test_predividing_keeps_a_sum_from_overflowing():
    huge, ones = np.float32(3e38), np.ones(2, "float32")
    # NCCL multiplies contributions by the product of both factors.
    overflow = -huge if _gpu.counts_host_memory() else -np.inf
    n, mean = keras_dist.size(), (1 + keras_dist.size()) / 2
    cases = [(3.0, 1 + keras_dist.rank(), -mean)]
    if n > 1:  # one rank sums nothing
        cases += [(float(n), huge, -huge), (0.5, huge, overflow)]
    for factor, mine, expected in cases:
        optimizer = keras.optimizers.SGD(1.0)
        keras_dist.DistributedOptimizer(optimizer, gradient_predivide_factor=factor)
        (value,) = apply(optimizer, [mine * ones])
        np.testing.assert_allclose(value, [expected, expected], rtol=1e-6)


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


# --- Adasum


@pytest.mark.jobs("jax-2")
@pytest.mark.parity("Adasum")
@pytest.mark.skipif(keras_dist.size() not in (1, 2, 4), reason="Adasum needs a power of two")
def test_adasum_sums_orthogonal_and_averages_parallel_gradients():
    n, rank = keras_dist.size(), keras_dist.rank()
    common, own = np.ones(n, "float32"), np.eye(n, dtype="float32")[rank]
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), op="Adasum")
    for value in apply(optimizer, [common, own]):
        np.testing.assert_allclose(value, -common, rtol=1e-6)


# --- Local variables


@pytest.mark.jobs("jax-2")
@pytest.mark.parity("local variables keep their own gradients")
@pytest.mark.parametrize("kind", ["variables", "a layer", "no layer", "all layers"])
@pytest.mark.parametrize(("passes", "scale"), [(1, True), (2, False)])
def test_local_variables_stay_local(passes, kind, scale):
    n, rank = keras_dist.size(), keras_dist.rank()
    model = make_model()
    count = {"no layer": 0, "all layers": 2}.get(kind, 1)
    options = {"scale_local_gradients": scale, "backward_passes_per_step": passes}
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if kind == "variables":
        keras_dist.DistributedOptimizer(optimizer, **options)
        for variable in model.layers[0].trainable_variables:
            optimizer.register_local_var(variable)
    else:
        layers = model.layers[0] if kind == "a layer" else model.layers[:count]
        keras_dist.PartialDistributedOptimizer(optimizer, local_layers=layers, **options)
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
    expected = 2 * count * [local] + 2 * (2 - count) * [shared]
    for weight, old, step in zip(weights_of(model), before, expected, strict=True):
        np.testing.assert_allclose(weight, old - np.float32(step), rtol=1e-5, atol=1e-6)
    compiled(model, optimizer)
    keras_dist.verify_replicas(model)


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
