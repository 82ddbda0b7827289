"""Ranks whose data ends earlier: `join`, and its use in `fit`."""

import functools

import keras
import ml_dtypes
import numpy as np
import pytest
from small_training import agreed, assert_close

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist.ops.reduce_op import ReduceOp
from keras_dist.training import model_state

pytestmark = pytest.mark.jobs("torch-2")
of_graphs = pytest.mark.jobs("tensorflow-2")

BATCH, RATE, MOMENTUM = 4, 0.1, 0.5
backend = keras.backend.backend()
on_tensorflow = pytest.mark.skipif(backend != "tensorflow", reason="of TensorFlow alone")


# --- join in scripts


def on_ranks_with_steps(counts, step):
    """Calls `step(number, here)` `counts[rank]` times on a rank; returns the result of `join`."""
    mine = counts[keras_dist.rank()]
    for number in range(mine):
        step(number, [rank for rank, count in enumerate(counts) if count > number])
    return keras_dist.join()


def counts_of(case):
    """Batches for each rank: the first or the last ranks have more than the others."""
    n = keras_dist.size()
    return {
        "even": [3] * n,
        "one more on the last": [2] * (n - 1) + [3],
        "many more on the first": [7] + [2] * (n - 1),
        "another number on each": [1 + 2 * rank for rank in range(n)],
        "none on the last": [3] * (n - 1) + [0],
    }[case]


CASES = [
    "even",
    "one more on the last",
    "many more on the first",
    "another number on each",
    "none on the last",
]


REDUCED = {"average": np.mean, "sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}


def value_of(rank, number, dtype, count):
    return ((np.arange(count) + rank + 3 * number) % 5 + 1).astype(dtype)


@pytest.mark.parametrize("count", [3, 50_000])  # the latter is reduced in slices
@pytest.mark.parametrize("case", CASES)
def test_reductions_are_among_the_ranks_that_have_not_joined(case, count):
    counts = counts_of(case)
    operations = [("average", "float32"), ("sum", "int64"), ("min", "float64"), ("average", "int8")]
    operations += [("product", "float32"), ("max", "bool"), ("average", ml_dtypes.bfloat16)]
    # The first has its memory before any rank joins, the others do not.
    keras_dist.allreduce(value_of(keras_dist.rank(), 0, "float32", count))

    def step(number, here):
        op, dtype = operations[number]
        values = [value_of(rank, number, dtype, count) for rank in here]
        stacked = np.stack(values).astype("float64" if op == "average" else dtype)
        wanted = REDUCED[op](stacked, axis=0)
        mine = value_of(keras_dist.rank(), number, dtype, count)
        result = keras_dist.allreduce(mine, op)
        assert result.dtype == mine.dtype
        np.testing.assert_allclose(
            result.astype("float64"), wanted.astype(dtype).astype("float64"), rtol=1e-6
        )

    last = on_ranks_with_steps(counts, step)
    assert last == max(range(len(counts)), key=lambda rank: (counts[rank], rank))
    # All ranks participate again.
    for _ in range(4):
        total = keras_dist.allreduce(value_of(keras_dist.rank(), 0, "float32", count), "sum")
        wanted = sum(value_of(rank, 0, "float32", count) for rank in range(keras_dist.size()))
        np.testing.assert_array_equal(total, wanted)


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_while_others_have_joined_stays_as_it_is(case):
    count, kept = 50_000, []  # reduced in slices
    counts, specs = counts_of(case), [((count,), np.dtype("float32"))]
    options = _engine.OpOptions(ReduceOp.SUM), _engine.BucketOptions(2**22, lend=True)
    plan = _engine.FusedAllreduce(runtime.communicator(), ["a"], specs, *options)

    def step(number, here):
        [result] = plan([value_of(keras_dist.rank(), number, "float32", count)])
        kept.append((result, sum(value_of(rank, number, "float32", count) for rank in here)))

    everyone = range(keras_dist.size())
    for _ in range(2):
        on_ranks_with_steps(counts, step)
        for number in range(4):
            step(number, everyone)
    for result, wanted in kept:
        np.testing.assert_array_equal(result, wanted)


def test_factors_lists_and_rows_while_others_have_joined():
    me = keras_dist.rank()

    def step(number, here):
        factors = {"prescale_factor": 2.0, "postscale_factor": 0.5}
        lists = keras_dist.grouped_allreduce([1.0 + me, np.full(2, me)], "sum", **factors)
        assert float(lists[0]) == sum(1 + rank for rank in here)
        assert lists[1].tolist() == [sum(here)] * 2
        assert keras_dist.grouped_allreduce([]) == []
        rows, places = keras_dist.sparse_allreduce(np.full((2, 3), 1.0 + me), [me, 9])
        assert places.tolist() == [*here, 9]
        alone = [(1 + rank) / len(here) for rank in here]
        np.testing.assert_allclose(rows[:, 1], [*alone, sum(alone)])
        handle = keras_dist.allreduce_async(np.float32(me), "sum")
        assert keras_dist.synchronize(handle) == sum(here)

    on_ranks_with_steps(counts_of("another number on each"), step)
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


@pytest.mark.jobs("torch-3")
def test_ranks_join_on_their_process_sets_too():
    if keras_dist.size() < 3:
        pytest.skip("needs a set of some of the ranks")
    pair = keras_dist.add_process_set([0, keras_dist.size() - 1])
    try:
        for number in range(3):
            if keras_dist.rank() == 0:
                assert keras_dist.allreduce(5.0, process_set=pair) == 5
            elif number == 0:
                assert keras_dist.join() == keras_dist.size() - 1
        if keras_dist.rank() == 0:
            keras_dist.join()
        in_pair = keras_dist.rank() in (0, keras_dist.size() - 1)
        assert not in_pair or keras_dist.allreduce(1.0, "sum", process_set=pair) == 2
    finally:
        keras_dist.remove_process_set(pair)


@pytest.mark.parametrize(
    "operation",
    [
        keras_dist.allgather,
        keras_dist.broadcast_object,
        keras_dist.reducescatter,
        functools.partial(keras_dist.allreduce, op="adasum"),
    ],
    ids=["allgather", "broadcast_object", "reducescatter", "adasum"],
)
def test_what_needs_all_ranks_is_an_error_on_all(operation):
    n = keras_dist.size()
    if n == 1:
        pytest.skip("nobody else can have joined")
    keras_dist.barrier()
    with pytest.raises(errors.MismatchError, match=f"while ranks {n - 1} are out of data"):
        if keras_dist.rank() == n - 1:
            keras_dist.join()
        else:
            assert keras_dist.allreduce(1.0, "sum") == n - 1
            operation(np.ones(4, "float32"))
    assert keras_dist.allreduce(1.0, "sum") == n
    assert keras_dist.join() == n - 1


@pytest.mark.jobs("torch-3")
def test_ranks_that_differ_while_others_have_joined_are_told_so():
    if keras_dist.size() < 3:
        pytest.skip("two ranks are needed beside the one that joins")
    with pytest.raises(errors.MismatchError, match=r"shape \(2,\) as on rank 1"):
        if keras_dist.rank() == 0:
            keras_dist.join()
        else:
            keras_dist.allreduce(np.ones(1 + min(keras_dist.rank(), 1) + keras_dist.rank() // 2))
    assert keras_dist.join() == keras_dist.size() - 1


# --- fit


def data_of(rank, count):
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((count * BATCH, 2)).astype("float32")
    return x, (x @ [[1.0], [-2.0]]).astype("float32")


@functools.cache
def trained_once(optimizer, predivide=1.0, passes=None, **options):
    """A compiled model and its initial state; made once, because it takes seconds to compile."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    momentum = {"momentum": MOMENTUM} if optimizer == "SGD" else {}
    made = getattr(keras.optimizers, optimizer)(
        RATE, gradient_accumulation_steps=passes, **momentum
    )
    made = keras_dist.DistributedOptimizer(made, gradient_predivide_factor=predivide)
    model.compile(made, loss="mse", **options)
    made.build(model.trainable_variables)
    return model, [np.array(keras.ops.convert_to_numpy(v)) for v in state_of(model)]


def state_of(model):
    return model_state.state(model) + model_state.accumulators(model_state.optimizers_of(model))


def model_of(optimizer="SGD", **options):
    model, first = trained_once(optimizer, **options)
    for variable, value in zip(state_of(model), first, strict=True):
        variable.assign(value)
    return model


def by_hand(model, counts_by_epoch):
    """The weights after steps that are averaged over the ranks with data."""
    weights = [w.astype("float64") for w in model.get_weights()]
    moments = [np.zeros_like(w) for w in weights]
    for counts in counts_by_epoch:
        data = [data_of(rank, count) for rank, count in enumerate(counts)]
        for number in range(max(counts)):
            rows = slice(number * BATCH, (number + 1) * BATCH)
            batches = [(x[rows], y[rows]) for x, y in data if len(x[rows])]
            gradients = []
            for x, y in batches:
                wrong = 2 * (x @ weights[0] + weights[1] - y) / len(x)
                gradients.append((x.T @ wrong, wrong.sum(axis=0)))
            for i, of_ranks in enumerate(zip(*gradients, strict=True)):
                moments[i] = MOMENTUM * moments[i] - RATE * np.mean(of_ranks, axis=0)
                weights[i] = weights[i] + moments[i]
    return weights


def fit(model, counts, *callbacks, uneven="continue", epochs=1, **options):
    x, y = data_of(keras_dist.rank(), counts[keras_dist.rank()])
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=keras_dist.callbacks(*callbacks, uneven=uneven),
        **options,
    )
    keras_dist.verify_replicas(model)
    assert agreed(history.history)
    return history


@of_graphs
@pytest.mark.jobs("torch-3", "training-double-torch-2")
@pytest.mark.parity("an epoch continues on ranks with more data; replicas stay equal")
@pytest.mark.parametrize(
    "case",
    [
        "many more on the first",
        pytest.param("another number on each", marks=pytest.mark.jobs("jax-2")),
    ],
)
def test_gradients_are_averaged_over_the_ranks_that_have_data(case):
    model, counts = model_of(), counts_of(case)
    wanted = by_hand(model, [counts, counts])
    history = fit(model, counts, epochs=2, validation_data=data_of(7, 2))
    assert_close(model.get_weights(), wanted, 1e-5)
    assert int(model.optimizer.iterations) == 2 * max(counts)
    assert len(history.history["val_loss"]) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"predivide": 2.0},
        pytest.param({"steps_per_execution": 2}, marks=[of_graphs, on_tensorflow]),
    ],
)
def test_options_change_nothing_in_the_average_over_the_ranks_that_have_data(options):
    model, counts = model_of(**options), counts_of("another number on each")
    wanted = by_hand(model, [counts, counts])
    fit(model, counts, epochs=2)
    assert_close(model.get_weights(), wanted, 1e-5)


@of_graphs
def test_generators_of_unknown_length_under_adam():
    model, counts = model_of("Adam"), counts_of("another number on each")
    x, y = data_of(keras_dist.rank(), counts[keras_dist.rank()])

    def batches():
        for first in range(0, len(x), BATCH):
            yield x[first : first + BATCH], y[first : first + BATCH]

    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(batches(), verbose=0, callbacks=keras_dist.callbacks())
    keras_dist.verify_replicas(model)
    # On TensorFlow, Keras may count the step that has no data.
    assert int(model.optimizer.iterations) - max(counts) in (
        [0, 1] if backend == "tensorflow" else [0]
    )


@of_graphs
def test_all_stop_when_the_first_is_out_of_data():
    model, counts = model_of(), counts_of("many more on the first")
    shortest = [min(counts)] * len(counts)
    wanted = by_hand(model, [shortest, shortest])
    fit(model, counts, uneven="stop", epochs=2)
    assert_close(model.get_weights(), wanted, 1e-5)
    assert int(model.optimizer.iterations) == 2 * min(counts)


class StopAt(keras.callbacks.Callback):
    """Stops at a batch of rank 0; with its hook ranks agree after every batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4 and keras_dist.rank() == 0:
            self.model.stop_training = True


@pytest.mark.parametrize(("uneven", "epochs"), [("continue", 1), ("stop", 3)])
def test_a_stop_while_others_are_out_of_data_stops_all(uneven, epochs):
    counts = counts_of("many more on the first")
    epochs = 1 if keras_dist.size() == 1 else epochs  # then the shortest has enough
    model = model_of()
    history = fit(model, counts, StopAt(), uneven=uneven, epochs=3)
    assert len(history.epoch) == epochs


def test_ranks_that_would_end_differently_are_told_so():
    if keras_dist.size() == 1:
        pytest.skip("ranks cannot differ when there is one")
    fit(model_of(), counts_of("even"), uneven="error")
    mine = "stop" if keras_dist.rank() == 0 else "continue"
    with pytest.raises(errors.MismatchError, match="uneven='stop' as on rank 0"):
        fit(model_of(), counts_of("even"), uneven=mine)


@of_graphs
@pytest.mark.parametrize(("others", "last"), [(2, 3), (3, 4)])
def test_gradients_that_wait_for_an_update(others, last):
    """Epochs of two batches; some ranks run out of data after one."""
    n = keras_dist.size()
    counts = [others] * (n - 1) + [last]
    model = model_of("Adam", passes=2)
    fit(model, counts, epochs=3)
    assert int(model.optimizer._iterations) == 3 * max(counts)
    own = [np.abs(keras.ops.convert_to_numpy(v)).sum() for v in state_of(model)[-2:]]
    # A rank at another step than the last rank starts its next update with it.
    waits = last == 3 and keras_dist.rank() == n - 1
    assert all(each > 0 for each in own) if waits else not any(own)


@of_graphs
@on_tensorflow
def test_a_rank_without_any_data():
    import tensorflow as tf

    model, counts = model_of(), counts_of("none on the last")
    wanted = by_hand(model, [counts])
    x, y = data_of(keras_dist.rank(), 3)
    mine = counts[keras_dist.rank()]
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).take(mine)
    model.fit(batches, verbose=0, callbacks=keras_dist.callbacks())
    keras_dist.verify_replicas(model)
    assert_close(model.get_weights(), wanted, 1e-5)


@of_graphs
def test_statistics_of_all_ranks_are_those_of_the_ranks_that_trained_on():
    steps = range(1, keras_dist.size() + 1)  # of each rank
    rows = [np.random.default_rng(rank).random((n, BATCH, 3)) for rank, n in enumerate(steps)]
    mean = np.zeros(3)
    for step in steps:
        here = np.concatenate([each[step - 1] for each in rows if len(each) >= step])
        mean = 0.5 * mean + 0.5 * here.mean(axis=0)
    layer = keras_dist.layers.SyncBatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    x = np.concatenate(rows[keras_dist.rank()]).astype("float32")
    options = {"shuffle": False, "verbose": 0, "callbacks": keras_dist.callbacks()}
    model.fit(x, x[:, :1], batch_size=BATCH, **options)
    found = keras.ops.convert_to_numpy(layer.moving_mean)
    np.testing.assert_allclose(found, mean, rtol=1e-5)
