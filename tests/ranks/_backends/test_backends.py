"""The JAX and torch backends: split steps, conversion of tensors, overlap, refused models."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from small_training import (
    agreed,
    assert_close,
    compiled,
    distributed,
    make_data,
    make_model,
    rows_of_rank,
    weights_of,
)

import keras_dist
from keras_dist import errors

pytestmark = [
    pytest.mark.jobs("hooks", "jax-2"),
    pytest.mark.skipif(keras_dist.size() == 1, reason="one rank does not reduce"),
]

BATCH, STEPS = 4, 3
BACKEND = keras.backend.backend()
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="tests the JAX backend")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="tests the TensorFlow backend")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="tests the torch backend")


def expected_and_rows(optimizer):
    """Trains plain Keras on all rows; returns its weights and this rank's rows."""
    x, y = make_data(BATCH * STEPS * keras_dist.size())
    plain = make_model(optimizer)
    plain.fit(x, y, batch_size=BATCH * keras_dist.size(), shuffle=False, verbose=0)
    return weights_of(plain), rows_of_rank(x, BATCH), rows_of_rank(y, BATCH)


# --- JAX


@on_jax
@pytest.mark.parametrize("jit_compile", [True, False])
def test_fit_reduces_between_two_programs_and_by_no_callback(monkeypatch, jit_compile):
    from keras_dist._backends.jax import backend

    if jit_compile:
        monkeypatch.setattr(backend, "call_host", None)  # a callback would fail
    expected, x, y = expected_and_rows(keras.optimizers.SGD(0.1))
    model = distributed(jit_compile=jit_compile)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=keras_dist.callbacks())
    assert_close(weights_of(model), expected)
    assert model.jit_compile is jit_compile
    assert not (jit_compile and "train_step" in vars(model))


@on_jax
def test_accumulation_steps_do_not_communicate(monkeypatch):
    from keras_dist import _engine

    calls = []
    original = _engine.FusedAllreduce.__call__

    def counted(self, arrays):
        calls.append(len(arrays))
        return original(self, arrays)

    monkeypatch.setattr(_engine.FusedAllreduce, "__call__", counted)
    model = distributed(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    x, y = make_data(6 * BATCH)
    for start in range(0, len(x), BATCH):
        model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])
    # Each step also sums what the losses of the ranks are divided by, as a single array.
    assert [arrays for arrays in calls if arrays > 1] == [4, 4]


# --- torch


@on_torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_conversion_of_every_float_dtype_is_exact(dtype):
    import torch

    kind = getattr(torch, dtype)
    variables = [keras.Variable(np.zeros((2, 3)), dtype=dtype), keras.Variable(0.0, dtype=dtype)]
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    rank, size = keras_dist.rank(), keras_dist.size()
    # Not contiguous, as the gradient of a transposed kernel.
    gradients = [torch.full((3, 2), float(rank), dtype=kind).T, torch.tensor(rank, dtype=kind)]
    optimizer.apply(gradients, variables)
    for variable in variables:
        assert variable.value.dtype == kind
        # Multiples of 0.5 are exact in every dtype.
        assert (variable.value == -(size - 1) / 2).all()


@on_torch
def test_sparse_gradients_are_reduced_as_rows():
    import torch

    from keras_dist import _backends
    from keras_dist.ops import reduction_options
    from keras_dist.training import gradient_reduction

    rank, size = keras_dist.rank(), keras_dist.size()
    gradient = torch.sparse_coo_tensor([[rank, rank, 7]], [[1.0, 2], [3, 4], [6, 6]], (9, 2))
    reduce = gradient_reduction.GradientReduction(reduction_options.ReductionOptions())
    table = keras.Variable(np.zeros((9, 2)), name="table")
    (result,) = reduce([gradient], [table])
    expected = np.zeros((9, 2))
    expected[:size] = [4 / size, 6 / size]
    expected[7] = 6
    assert result.is_sparse
    np.testing.assert_allclose(result.to_dense().numpy(), expected, rtol=1e-6)
    alone = _backends.active().coalesce([gradient], [table])[0]  # of a local layer
    assert alone.indices().shape == (1, 2)


@pytest.fixture
def distribution():
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    yield
    keras.distribution.set_distribution(before)


def sgd():
    return keras_dist.DistributedOptimizer(keras.optimizers.SGD())


def test_a_keras_distribution_is_refused(distribution):
    model = make_model(sgd())
    with pytest.raises(errors.BackendError, match="DataParallel active on") as raised:
        model.fit(*make_data(8), verbose=0)
    assert "gradients keras_dist alone averages" in str(raised.value)
    data = keras_dist.data.shard(make_data(8), batch_size=2)
    with pytest.raises(errors.BackendError, match="data that keras_dist alone shares out"):
        make_model().fit(data, verbose=0)


class Counted(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1


@on_tensorflow
@pytest.mark.parametrize("in_scope", ["all", "the model", "the optimizer", "fit"])
@pytest.mark.parametrize("name", ["MirroredStrategy", "OneDeviceStrategy"])
def test_a_strategy_of_tf_distribute_is_refused(name, in_scope):
    import tensorflow as tf

    device = ["CPU:0"] if name == "MirroredStrategy" else "CPU:0"
    strategy = getattr(tf.distribute, name)(device)

    def scope_of(part):
        return strategy.scope() if in_scope in ("all", part) else contextlib.nullcontext()

    with scope_of("the optimizer"):
        optimizer = sgd()
    with scope_of("the model"):
        model = make_model()
    counted = Counted()
    with scope_of("fit"), pytest.raises(errors.BackendError, match=rf"tf\.distribute\.{name}"):
        compiled(model, optimizer).fit(*make_data(8), verbose=0, callbacks=[counted])
    assert counted.steps == 0
    with scope_of("fit"), pytest.raises(errors.BackendError, match=rf"tf\.distribute\.{name}"):
        compiled(model, optimizer).train_on_batch(*make_data(8))


@on_tensorflow
@pytest.mark.parametrize("traced", [False, True])
def test_a_tape_in_a_strategy_is_refused(traced):
    import tensorflow as tf

    import keras_dist.tensorflow as hvd

    weights = tf.Variable([1.0, 2.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights**2)
        return hvd.DistributedGradientTape(tape).gradient(loss, [weights])

    run = functools.partial(tf.distribute.OneDeviceStrategy("CPU:0").run, step)
    with pytest.raises(Exception, match=r"alone averages. Received: a tf\.distribute\.OneDevice"):
        (tf.function(run) if traced else run)()


@pytest.fixture
def group_of_torch(shared_tmp_path):
    """A process group of torch with this rank alone."""
    import torch

    store = torch.distributed.FileStore(str(shared_tmp_path / f"{keras_dist.rank()}"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@on_torch
def test_a_model_that_keras_would_wrap_in_ddp_is_refused(group_of_torch):
    model = make_model(sgd())
    vars(model).setdefault("ddp_model", None)  # as in Keras 3.16
    with pytest.raises(errors.BackendError, match=r"DistributedDataParallel \(ddp_model\)"):
        model.fit(*make_data(8), verbose=0)


@pytest.mark.parity("a model in `DistributedDataParallel` is rejected")
@on_torch
def test_a_model_with_ddp_is_refused(group_of_torch):
    import torch

    inner = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
    layers = [keras.Input((6,)), keras.layers.TorchModuleWrapper(inner)]
    model = compiled(keras.Sequential(layers), sgd())
    with pytest.raises(errors.ArgumentError, match="DistributedDataParallel in it"):
        model.fit(*make_data(8), verbose=0)


@pytest.fixture
def queued(monkeypatch):
    """Counts the queued buckets; each gradient has its own bucket."""
    from keras_dist._engine import FusedAllreduce
    from keras_dist.ops import gradient_plans

    counted = []
    queue = FusedAllreduce.queue_bucket

    def counting(self, number, arrays):
        counted.append(number)
        return queue(self, number, arrays)

    monkeypatch.setattr(FusedAllreduce, "queue_bucket", counting)
    monkeypatch.setattr(gradient_plans, "bucket_nbytes", lambda *_: 1)
    monkeypatch.setattr(gradient_plans, "overlaps", lambda _: True)
    return counted


@on_torch
def test_reductions_overlap_with_backpropagation(queued):
    expected, x, y = expected_and_rows(keras.optimizers.Adam(0.01))
    model = distributed(keras.optimizers.Adam(0.01))
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_close(weights_of(model), expected)
    # The first step makes the plan; the others queue four gradients, last gradient first.
    assert queued == [0, 1, 2, 3] * (STEPS - 1)
    if keras_dist.rank() == 0:  # a backward pass outside the step queues nothing
        model(x).sum().backward()
    assert len(queued) == 4 * (STEPS - 1)


@on_torch
@pytest.mark.parametrize("where", ["on all ranks", "on one rank"])
@pytest.mark.parametrize("what", ["two passes", "a change"])
def test_changed_gradients_are_reduced_again(queued, what, where, monkeypatch):
    import torch

    from keras_dist.ops import gradient_plans

    changes = where == "on all ranks" or keras_dist.rank() == keras_dist.size() - 1

    class Custom(keras.Model):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            for _ in range(2 if changes and what == "two passes" else 1):
                keras.losses.mean_squared_error(y, self(x)).mean().backward()
            with torch.no_grad():
                weights = self.trainable_weights
                for weight in weights[:1] if changes and what == "a change" else ():
                    weight.value.grad.mul_(2)
                self.optimizer.apply([w.value.grad for w in weights], weights)
            return {}

    def train(optimizer, x, y, batch):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((x.shape[1],))
        model = Custom(inputs, keras.layers.Dense(3)(inputs))
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return weights_of(model)

    def train_distributed():
        return train(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), *own_rows, BATCH)

    x, _ = make_data(BATCH * STEPS * keras_dist.size())
    y = x[:, :3]
    own_rows = [rows_of_rank(array, BATCH) for array in (x, y)]
    if where == "on all ranks":
        expected = train(keras.optimizers.SGD(0.1), x, y, BATCH * keras_dist.size())
    else:
        with monkeypatch.context() as patched:
            patched.setattr(gradient_plans, "overlaps", lambda _: False)
            expected = train_distributed()
    weights = train_distributed()
    assert_close(weights, expected)
    assert agreed([weight.tobytes() for weight in weights])
    # In vain once, on a rank of changes without the last bucket; then the overlap stops.
    assert len(queued) == (1 if changes else 2)
