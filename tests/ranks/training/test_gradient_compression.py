"""Compression of gradients with error feedback, in training on each backend."""

import keras
import numpy as np
import pytest
from interrupting import Interrupt, Interrupted, everything_of
from small_training import BATCH, CLASSES, FEATURES, assert_close, make_data, weights_of

import keras_dist
from keras_dist import Compression, errors

BACKEND = keras.backend.backend()
RANK, SIZE = keras_dist.rank(), keras_dist.size()
WIDTH = 32
LOW_RANK = "powersgd(rank=2, min_compression_rate=1)"
METHODS = {"powersgd": LOW_RANK, "topk": "topk(ratio=0.1)", "int8": "int8()", "int4": "INT4()"}
EXACT = {
    "powersgd": Compression.powersgd(rank=WIDTH, min_compression_rate=0.1),
    "topk": Compression.topk(ratio=1.0),
}

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")
in_gpu_memory = pytest.mark.jobs("training-double-torch-2")


def make(compression, optimizer=None, wraps=lambda one: one, is_traced=False, **options):
    """A network with matrices that are compressed, and biases that are not."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(WIDTH, "tanh")]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = wraps(optimizer or keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer = keras_dist.DistributedOptimizer(optimizer, compression=compression, **options)
    # Tracing takes longest on TensorFlow, and eager steps on JAX.
    model.compile(optimizer, loss, run_eagerly=BACKEND == "tensorflow" and not is_traced)
    return model


def fit(model, *callbacks, epochs=2, steps=4):
    x, y = make_data(steps * BATCH, seed=RANK)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": epochs}
    history = model.fit(x, y, callbacks=keras_dist.callbacks(*callbacks), **options)
    keras_dist.verify_replicas(model)
    return history


def key_of(v):
    return id(v if BACKEND == "jax" else v.value)


def errors_of(optimizer):
    feedback = optimizer._keras_dist.feedback
    return {key: error.copy() for key, error in feedback.errors.items()}


def bits(model):
    found = errors_of(model.optimizer)
    keys = [key_of(v) for v in model.trainable_variables]
    return [*everything_of(model), *(found[key].tobytes() for key in keys if key in found)]


@on_each_backend
@pytest.mark.long
@pytest.mark.parity(
    "gradients are compressed with error feedback: `powersgd`, `topk`, `int8`, `int4`"
)
@pytest.mark.parametrize("method", METHODS)
def test_fit_keeps_replicas_equal_and_learns(method):
    model = make(METHODS[method], is_traced=True)
    losses = fit(model, epochs=8).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    if SIZE > 1:
        assert any(error.any() for error in errors_of(model.optimizer).values())


def variable(shape, name):
    return keras.Variable(np.zeros(shape, "float32"), name=name)


SHAPES = {"kernel": (40, 30), "filters": (3, 3, 8, 16), "bias": (30,), "rare": (50, 20)}


def gradient_of(rank, step, name):
    if name == "rare" and step % 3 == 0:
        return None  # on all ranks
    if name == "filters" and (rank + step) % 2 and BACKEND != "jax":
        return None  # on some
    rng = np.random.default_rng([rank, step, len(name)])
    return rng.standard_normal(SHAPES[name]).astype("float32")


@in_gpu_memory
@on_each_backend
@pytest.mark.parametrize(("method", "op"), zip(METHODS, ["average", "sum"] * 2, strict=True))
def test_updates_and_errors_add_up_to_the_gradients(method, op):
    variables = [variable(shape, name) for name, shape in SHAPES.items()]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    optimizer = keras_dist.DistributedOptimizer(optimizer, op, compression=METHODS[method])
    totals = [np.zeros(shape) for shape in SHAPES.values()]
    for step in range(6):
        every = [[gradient_of(rank, step, name) for name in SHAPES] for rank in range(SIZE)]
        own = [None if g is None else keras.ops.convert_to_tensor(g) for g in every[RANK]]
        optimizer.apply(own, variables)
        for total, *found in zip(totals, *every, strict=True):
            total += sum(g for g in found if g is not None) / (SIZE if op == "average" else 1)
    known = errors_of(optimizer)
    keys = [key_of(v) for v in variables]
    for key, v, total in zip(keys, variables, totals, strict=True):
        value = keras.ops.convert_to_numpy(v)
        assert keras_dist.allgather_object(value.tobytes()) == SIZE * [value.tobytes()]
        left = keras_dist.allreduce(known.get(key, np.zeros(v.shape)).reshape(v.shape), op)
        np.testing.assert_allclose(left - value, total, atol=1e-4)
    if SIZE > 1:
        assert [key in known for key in keys] == [True, True, False, method == "powersgd"]


# Errors that only add up would satisfy the test above.
def test_elements_that_are_never_among_the_largest_are_learned_by_the_feedback():
    v, shape, count = variable((64, 64), "weights"), (64, 64), 64
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build([v])
    compression = Compression.topk(count / 64**2)
    optimizer = keras_dist.DistributedOptimizer(optimizer, compression=compression)
    # Large gradients, of opposite signs on pairs of ranks, hide those that all ranks have.
    noise = np.zeros(shape, "float32")
    noise[0] = (10 if RANK % 2 else -10) * (RANK < SIZE // 2 * 2)
    for _ in range(300):
        gradient = keras.ops.convert_to_numpy(v) - 1 + noise
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [v])
    if SIZE % 2 == 0:
        assert np.abs(keras.ops.convert_to_numpy(v) - 1).mean() < 0.2


@pytest.mark.parametrize(
    ("method", "value"), [("powersgd", 3e38), ("topk", np.nan), ("int8", np.inf)]
)
def test_gradients_that_are_not_finite_leave_the_errors_as_they_were(method, value):
    v = variable((40, 40), "weights")
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([v])
    optimizer = keras_dist.DistributedOptimizer(optimizer, compression=METHODS[method])
    rng = np.random.default_rng(RANK)
    optimizer.apply([keras.ops.convert_to_tensor(rng.random((40, 40), "float32"))], [v])
    before = errors_of(optimizer)
    gradient = rng.random((40, 40), "float32")
    if RANK == SIZE - 1:
        gradient[3] = value  # 3e38 overflows in a product
    optimizer.apply([keras.ops.convert_to_tensor(gradient)], [v])
    assert SIZE == 1 or not np.isfinite(keras.ops.convert_to_numpy(v)).all()
    assert all(np.array_equal(before[key], e) for key, e in errors_of(optimizer).items())
    assert SIZE == 1 or before


def trained_with_a_loss_scale(compression, is_traced=False):
    def scaled(optimizer):
        scaling = {"initial_scale": 1024.0, "dynamic_growth_steps": 3}
        return keras.optimizers.LossScaleOptimizer(optimizer, **scaling)

    model = make(compression, keras.optimizers.SGD(0.1), scaled, is_traced)
    x, y = make_data(12 * BATCH, seed=RANK)
    if RANK == SIZE - 1:
        x[5 * BATCH] = np.inf  # all ranks skip this step
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=keras_dist.callbacks(), **options)
    keras_dist.verify_replicas(model)
    assert int(model.optimizer.inner_optimizer.iterations) == 11
    return model


@on_each_backend
@pytest.mark.parametrize("method", EXACT)
def test_what_leaves_nothing_out_trains_under_a_loss_scale_as_without_compression(method):
    model, plain = map(trained_with_a_loss_scale, (EXACT[method], "none"))
    assert_close(weights_of(model), weights_of(plain), 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_scale_does_not_scale_the_errors(method):
    model = trained_with_a_loss_scale(METHODS[method], is_traced=method == "topk")
    found = errors_of(model.optimizer).values()
    assert all(np.isfinite(weight).all() for weight in weights_of(model))
    assert SIZE == 1 or any(error.any() for error in found)
    assert all(np.abs(error).max() < 10 for error in found)  # of the size of gradients


@on_each_backend
def test_accumulated_gradients_are_compressed_once_for_each_update():
    model = make(METHODS["topk"], backward_passes_per_step=2, is_traced=True)
    fit(model)
    assert model.optimizer._keras_dist.feedback.step == (4 if SIZE > 1 else 0)


KINDS = keras_dist.callbacks.BackupAndRestore, keras_dist.callbacks.ShardedCheckpoint


# int4 has the state of int8.
@pytest.mark.parametrize("method", ["powersgd", "topk", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_fit_has_the_same_bits(method, kind, shared_tmp_path):
    folder = shared_tmp_path / "backup"
    compression = f"{METHODS[method][:-1]}, start_step=2)"
    expected = make(compression)
    fit(expected)
    with pytest.raises(Interrupted):
        fit(make(compression), kind(folder, save_freq=1), Interrupt(1, 1))
    keras_dist.barrier()
    model = make(compression)
    fit(model, kind(folder, save_freq=1))
    assert bits(model) == bits(expected)


def test_errors_of_another_number_of_ranks_are_divided():
    from keras_dist.resume.rank_states import CompressionErrors

    model = make(METHODS["topk"])
    fit(model, epochs=1)
    state = CompressionErrors(model)
    [given] = state.give()
    states = [
        [{"step": 5, "bases": {}, "errors": {2: np.full(WIDTH**2, rank, "float32")}}]
        for rank in range(SIZE + 1)
    ]
    assert state.take(states)
    assert model.optimizer._keras_dist.feedback.step == 5
    [error] = errors_of(model.optimizer).values()
    np.testing.assert_allclose(error, SIZE / 2)
    if SIZE > 1:
        assert given["step"] == 4
        assert 2 in given["errors"]


@pytest.mark.parametrize("method", ["powersgd", "topk", "int8"])
def test_ranks_that_were_absent_follow_the_others(method):
    model = make(METHODS[method])
    counts = [3 + 2 * rank for rank in range(SIZE)]
    x, y = make_data(counts[RANK] * BATCH, seed=RANK)
    model.fit(
        x, y, batch_size=BATCH, epochs=3, verbose=0, shuffle=False, callbacks=keras_dist.callbacks()
    )
    keras_dist.verify_replicas(model)
    steps = keras_dist.allgather_object(model.optimizer._keras_dist.feedback.step)
    assert SIZE == 1 or max(steps) == 3 * max(counts)


def test_where_no_error_can_be_kept_it_is_refused():
    topk = Compression.topk()
    for call, value in ((keras_dist.allreduce, 1.0), (keras_dist.grouped_allreduce, [1.0])):
        with pytest.raises(errors.ArgumentError, match="Pass it to DistributedOptimizer"):
            call(value, compression=topk)
    for options in ({"shard_state": True}, *([{"op": "adasum"}] if SIZE in (1, 2, 4) else [])):
        with pytest.raises(errors.ArgumentError, match="with compression=topk"):
            keras_dist.DistributedOptimizer(keras.optimizers.SGD(), compression=topk, **options)


@pytest.mark.skipif(SIZE == 1, reason="one rank cannot differ")
def test_ranks_with_another_compression_are_an_error():
    model = make(METHODS["topk"] if RANK else METHODS["powersgd"])
    with pytest.raises(errors.MismatchError, match=r"by (topk|powersgd)\("):
        model.optimizer.apply(
            [keras.ops.ones(v.shape) for v in model.trainable_variables], model.trainable_variables
        )


@pytest.mark.jobs("torch-3")
@pytest.mark.skipif(SIZE < 3, reason="needs three ranks")
def test_a_process_set_has_errors_of_its_own():
    others = keras_dist.add_process_set(range(1, SIZE))
    model = make(LOW_RANK, process_set=others)
    x, y = make_data(BATCH, seed=RANK)
    for _ in range(2):
        model.train_on_batch(x, y)
    assert bool(errors_of(model.optimizer)) == (RANK > 0)
    found = keras_dist.allgather_object(everything_of(model))
    assert all(each == found[1] for each in found[1:])
    keras_dist.remove_process_set(others)
