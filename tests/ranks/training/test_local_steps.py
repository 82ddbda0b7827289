"""`DistributedOptimizer(local_steps=...)`: steps of each rank, averages at the ends of rounds."""

import itertools

import keras
import numpy as np
import pytest
from local_training import (
    BACKEND,
    BATCH,
    STEPS,
    WAYS,
    Stop,
    batches_of,
    data_of,
    fit,
    graph_of,
    local,
    make,
    tf_update,
    weights_of_reference,
)
from small_training import agreed, assert_close, compiled, weights_of
from start_jobs import wait_for

import keras_dist
from keras_dist import LocalSteps, errors
from keras_dist.training.model_state import to_numpy

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")
on_tensorflow_as_well = pytest.mark.jobs("tensorflow-2")
in_gpu_memory = pytest.mark.jobs("training-double-torch-2")

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
of_graphs = pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow's graphs")
several_in_an_execution = pytest.mark.skipif(
    BACKEND == "torch", reason="Keras on torch takes one step in an execution"
)


@on_each_backend
@several_in_an_execution
def test_train_on_batch_takes_one_step_of_a_round_whatever_an_execution_has():
    model = make(local(SGD(0.1), 3), steps_per_execution=2)
    equal = []
    for x, y in batches_of(keras_dist.rank())[:3]:
        model.train_on_batch(x, y)
        equal.append(agreed([to_numpy(w).tobytes() for w in model.weights]))
    assert equal == [keras_dist.size() == 1] * 2 + [True]


@in_gpu_memory
@on_each_backend
@pytest.mark.long
@pytest.mark.jobs("tensorflow-1", "torch-3")
@pytest.mark.parity("local steps: rounds of `fit` equal those computed by numpy: {name}")
@pytest.mark.parametrize(
    "name, outer, rate, momentum",
    [
        ("DiLoCo", "nesterov", 1.0, 0.5),
        ("plain averages", None, 1.0, 0.0),
        ("SGD", SGD(0.5), 0.5, 0.0),
    ],
)
def test_rounds_equal_a_reference(name, outer, rate, momentum):
    model = make(local(Adam(0.01), 3, outer=outer), normalized=True)
    fit(model, epochs=2)
    how = {"rate": rate, "momentum": momentum, "normalized": True, "epochs": 2}
    assert_close(weights_of(model), weights_of_reference(lambda: Adam(0.01), 3, **how), 2e-6)
    assert agreed([to_numpy(w).tobytes() for w in model.weights])
    keras_dist.verify_replicas(model)


@on_each_backend
@pytest.mark.jobs("torch-3")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("length", "count", "delay"), [(3, 1, 0), (4, 3, 2)])
def test_steps_that_are_taken_otherwise_equal_a_reference(way, length, count, delay):
    optimizer = local(SGD(0.1), length, fragments=count, delay=delay)
    model = make(optimizer, jit_compile=way == "XLA" or "auto")
    WAYS[way](model)
    expected = weights_of_reference(lambda: SGD(0.1), length, count, delay)
    assert_close(weights_of(model), expected, 4e-6)
    assert agreed([w.tobytes() for w in weights_of(model)])


def test_averages_after_each_step_of_sgd_are_those_of_gradients():
    optimizers = local(SGD(0.1), 1, outer=None), local(SGD(0.1), 1, outer=SGD(1.0))
    models = [make(each) for each in (*optimizers, keras_dist.DistributedOptimizer(SGD(0.1)))]
    for model in models:
        fit(model)
    averaged, stepped, reduced = map(weights_of, models)
    for value, wanted in zip(averaged, stepped, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert_close(averaged, reduced)


@on_each_backend
def test_a_round_takes_its_steps_without_communication(shared_tmp_path):
    model = make(local(SGD(0.1), 3))
    fit(model)
    turns = [shared_tmp_path / str(rank) for rank in range(keras_dist.size())]
    # Each rank waits until the one before has taken its steps, which needs no other then.
    for turn in turns[: keras_dist.rank()]:
        assert wait_for(turn.exists)
    batches = batches_of(keras_dist.rank())
    for x, y in batches[:2]:
        model.train_on_batch(x, y)
    turns[keras_dist.rank()].touch()
    model.train_on_batch(*batches[2])
    assert agreed([w.tobytes() for w in weights_of(model)])


@on_each_backend
def test_accumulated_batches_are_one_step():
    optimizer = Adam(0.01, gradient_accumulation_steps=2)
    model = make(local(optimizer, 3, outer=None))
    ended = []
    for x, y in batches_of(keras_dist.rank())[:6]:
        model.train_on_batch(x, y)
        ended.append(model.optimizer._keras_dist.rounds.ended)
    assert ended == [0, 0, 0, 0, 0, 1]
    assert agreed([w.tobytes() for w in weights_of(model)])


@on_each_backend
@several_in_an_execution
def test_a_round_ends_with_an_execution_of_several_steps():
    model = make(local(SGD(0.1), 3, outer=None), steps_per_execution=2)
    fit(model)
    assert model.optimizer._keras_dist.rounds.ended == 2  # after 4 and 7 steps
    keras_dist.verify_replicas(model)


@on_tensorflow_as_well
@of_graphs
@pytest.mark.parametrize("streaming", [{}, {"fragments": 2, "delay": 1}])
def test_steps_of_other_kinds_have_rounds_of_their_own(streaming):
    model = make(optimizer := local(SGD(0.1), 4, **streaming))
    x, y = batches_of(keras_dist.rank())[0]
    model.train_on_batch(x, y)
    with pytest.raises(Exception, match=r"Call optimizer\.finish_round\(\) before the function"):
        graph_of(model)(x, y)
    optimizer.finish_round()
    update = graph_of(model)
    for _ in range(2):
        for _ in range(5):
            update(x, y)
        model.train_on_batch(x, y)
    optimizer.finish_round()
    assert agreed([w.tobytes() for w in weights_of(model)])
    before = optimizer._keras_dist.rounds.ended
    fit(model)
    assert optimizer._keras_dist.rounds.ended < before + STEPS  # not one in each step
    assert agreed([w.tobytes() for w in weights_of(model)])


@on_tensorflow_as_well
@of_graphs
def test_a_graph_that_one_rank_traces_again_counts_its_steps():
    model = make(optimizer := local(SGD(0.1), 10, outer=None))
    update = graph_of(model)
    for number, (x, y) in enumerate(batches_of(keras_dist.rank())):
        rows = slice(0, BATCH - (number == 2 and keras_dist.rank() > 0))
        update(x[rows], y[rows])
    everyone = keras_dist.allgather_object(weights_of(model))
    optimizer.finish_round()
    expected = [np.mean(values, axis=0) for values in zip(*everyone, strict=True)]
    assert_close(weights_of(model), expected, 2e-6)


@on_tensorflow_as_well
@of_graphs
def test_weights_may_be_broadcast_after_the_first_step():
    import keras_dist.tensorflow as hvd

    model = make(optimizer := local(SGD(0.1), 3, outer=None))
    model.set_weights([weight + keras_dist.rank() for weight in model.get_weights()])
    for number, (x, y) in enumerate(batches_of(keras_dist.rank())):
        tf_update(model, x, y)
        if number == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
    optimizer.finish_round()
    assert agreed([w.tobytes() for w in weights_of(model)])


@on_each_backend
@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_a_compiled_update_of_a_loop_is_refused():
    model = make(optimizer := local(SGD(0.1), 3))
    optimizer.build(model.trainable_variables)
    values = [v.value for v in model.trainable_variables]
    with pytest.raises(errors.UsageError, match=r"optimizer\.apply"):
        optimizer.stateless_apply([v.value for v in optimizer.variables], values, values)


@pytest.mark.parametrize("options", [{"op": "sum"}, {"shard_state": True}])
def test_options_of_reduced_gradients_are_refused(options):
    with pytest.raises(errors.ArgumentError, match="local_steps"):
        keras_dist.DistributedOptimizer(SGD(0.1), local_steps=4, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        {"steps": 0},
        {"steps": 1.5},
        {"outer": 3},
        {"within": "rack"},
        {"fragments": 0},
        {"steps": 4, "fragments": 5},
        {"delay": -1},
        {"steps": 4, "delay": 4},
    ],
)
def test_invalid_arguments_are_refused(arguments):
    with pytest.raises((errors.ArgumentError, errors.ArgumentTypeError), match="Received"):
        LocalSteps(**arguments)


# --- What a fit does beside steps

STREAMS = {
    "rounds": {"steps": 3, "outer": None},
    "fragments": {"steps": 4, "fragments": 2},
    "late averages": {"steps": 4, "fragments": 2, "delay": 2},
}


@pytest.mark.parametrize(
    "kind", ["rounds", "fragments", pytest.param("late averages", marks=on_each_backend)]
)
def test_a_stop_on_one_rank_takes_effect_where_the_last_fragment_is_due(kind):
    asks, stops = (3, 6) if kind == "rounds" else (1, 4)
    model = make(local(SGD(0.1), **STREAMS[kind]))
    fit(model, epochs=2, callbacks=[Stop(asks)])
    assert int(model.optimizer.iterations) == stops
    assert model.optimizer._keras_dist.rounds.ended == 2 or kind != "rounds"
    keras_dist.verify_replicas(model)


everywhere = "late averages", "continue", 3


@pytest.mark.jobs("torch-3")
@pytest.mark.parametrize(
    ("kind", "uneven", "others"),
    [
        pytest.param(*case, marks=[on_each_backend, in_gpu_memory] if case == everywhere else [])
        for case in itertools.product(STREAMS, ("continue", "stop"), (3, 6))
    ],
)
def test_ranks_out_of_data_have_the_weights_of_the_others(kind, uneven, others):
    model = make(local(SGD(0.1), **STREAMS[kind]))
    x, y = data_of(keras_dist.rank())
    count = BATCH * (STEPS if keras_dist.rank() == 0 else others)
    callbacks = keras_dist.callbacks(uneven=uneven)
    model.fit(x[:count], y[:count], BATCH, 2, shuffle=False, verbose=0, callbacks=callbacks)
    keras_dist.verify_replicas(model)


@pytest.mark.jobs("jax-2")
def test_metrics_are_those_of_all_samples():
    model = make(local(SGD(0.0), 3), metrics=["accuracy"])
    logs = fit(model, validation_data=data_of(keras_dist.rank())).history
    x, y = (
        np.concatenate(each) for each in zip(*map(data_of, range(keras_dist.size())), strict=True)
    )
    loss, accuracy = make(SGD(0.0), metrics=["accuracy"]).evaluate(x, y, verbose=0)
    found = [logs[name][0] for name in ("loss", "accuracy", "val_loss", "val_accuracy")]
    np.testing.assert_allclose(found, [loss, accuracy] * 2, rtol=1e-5)


@on_tensorflow_as_well
def test_averaged_weights_and_schedules():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = make(local(SGD(schedule, use_ema=True, ema_momentum=0.5, clipnorm=0.1), 3))
    fit(model, epochs=2)
    keras_dist.verify_replicas(model)
    assert agreed([to_numpy(w).tobytes() for w in model.weights])


@on_each_backend
def test_loss_scales_of_ranks_are_their_own():
    model = make(local(keras.optimizers.LossScaleOptimizer(SGD(0.1)), 3, outer=None))
    fit(model)
    plain = make(local(SGD(0.1), 3, outer=None))
    fit(plain)
    assert_close(weights_of(model), weights_of(plain))
    assert model.optimizer._keras_dist.rounds.ended == 3


@on_tensorflow_as_well
def test_rows_of_embeddings():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(50, 6), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile(local(Adam(0.1), 2), "mse")
    x = np.random.default_rng(keras_dist.rank()).integers(0, 50, (16, 3))
    model.fit(x, x[:, 0], 4, verbose=0, callbacks=keras_dist.callbacks())
    keras_dist.verify_replicas(model)


def test_local_layers_are_not_averaged():
    model = make(SGD(0.1))
    steps = LocalSteps(3)
    optimizer = keras_dist.PartialDistributedOptimizer(
        SGD(0.1), local_layers=model.layers[-1], local_steps=steps
    )
    compiled(model, optimizer)
    fit(model)
    shared, own = model.layers[0].get_weights(), model.layers[-1].get_weights()
    assert agreed([w.tobytes() for w in shared])
    if keras_dist.size() > 1:
        assert not agreed([w.tobytes() for w in own])


def test_copies_have_the_same_local_steps(shared_tmp_path):
    model = make(local(SGD(0.1), 3, outer=SGD(0.5), fragments=2, delay=1))
    fit(model)
    if keras_dist.rank() == 0:
        model.save(shared_tmp_path / "model.keras")
    keras_dist.barrier()
    loaded = keras_dist.load_model(shared_tmp_path / "model.keras")
    for each in (model, loaded):
        fit(each)
    for value, wanted in zip(weights_of(loaded), weights_of(model), strict=True):
        np.testing.assert_array_equal(value, wanted)
    rounds = loaded.optimizer._keras_dist.rounds
    assert [outer.learning_rate for outer in rounds.outers] == [0.5] * 2
    assert len(rounds.fragments) == 2


@pytest.mark.skipif(keras_dist.size() == 1, reason="of several ranks")
def test_other_numbers_of_steps_on_a_rank_are_an_error():
    model = make(local(SGD(0.1), 2 + keras_dist.rank() % 2))
    with pytest.raises(errors.MismatchError, match="the same local_steps"):
        model.train_on_batch(*batches_of(0)[0])
