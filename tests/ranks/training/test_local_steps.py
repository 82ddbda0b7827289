"""`DistributedOptimizer(local_steps=...)`: steps of each rank, averages at the ends of rounds."""

import itertools

import keras
import numpy as np
import pytest
from local_training import (
    BACKEND,
    BATCH,
    STEPS,
    batches_of,
    data_of,
    fit,
    local,
    make,
    tf_update,
    update_of_loop,
)
from small_training import agreed, assert_close, compiled, weights_of
from start_jobs import wait_for

import keras_dist
from keras_dist import LocalSteps, errors
from keras_dist.training.model_state import to_numpy

pytestmark = pytest.mark.jobs("training", "tensorflow-1", "jax-2", "torch-3")

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
ROUNDS = 3, 3, 1  # of an epoch with rounds of three steps


def reference(make_inner, rate, momentum, epochs=1, normalized=False):
    """Trains the models of all ranks in this process; the outer optimizer is that of the paper."""
    models = [make(make_inner(), normalized) for _ in range(keras_dist.size())]
    anchors = [np.float64(w) for w in weights_of(models[0])]
    trained = [w.trainable for w in models[0].weights]
    velocities = [np.zeros_like(anchor) for anchor in anchors]
    for _ in range(epochs):
        batches = [iter(batches_of(rank)) for rank in range(len(models))]
        for steps in ROUNDS:
            for model, mine in zip(models, batches, strict=True):
                for x, y in itertools.islice(mine, steps):
                    model.train_on_batch(x, y)
            means = [np.mean(ws, axis=0) for ws in zip(*map(weights_of, models), strict=True)]
            for at, mean in enumerate(means):
                gradient = anchors[at] - mean
                velocities[at] = momentum * velocities[at] + gradient
                step = rate * (gradient + momentum * velocities[at])
                anchors[at] = anchors[at] - step if trained[at] else mean
            for model in models:
                model.set_weights([anchor.astype("float32") for anchor in anchors])
    return anchors


@pytest.mark.skipif(BACKEND == "torch", reason="has no steps_per_execution")
def test_train_on_batch_takes_one_step_of_a_round_whatever_an_execution_has():
    model = make(local(SGD(0.1), 3), steps_per_execution=2)
    equal = []
    for x, y in batches_of(keras_dist.rank())[:3]:
        model.train_on_batch(x, y)
        equal.append(agreed([to_numpy(w).tobytes() for w in model.weights]))
    assert equal == [keras_dist.size() == 1] * 2 + [True]


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
    expected = reference(lambda: Adam(0.01), rate, momentum, epochs=2, normalized=True)
    assert_close(weights_of(model), expected, 2e-6)
    assert agreed([to_numpy(w).tobytes() for w in model.weights])
    keras_dist.verify_replicas(model)


def test_averages_after_each_step_are_those_of_an_outer_step_of_one():
    averaged, stepped = (
        make(local(Adam(0.01), 1, outer=None)),
        make(local(Adam(0.01), 1, outer=SGD(1.0))),
    )
    for model in (averaged, stepped):
        fit(model)
    for value, wanted in zip(weights_of(averaged), weights_of(stepped), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_averages_after_each_step_of_sgd_are_those_of_gradients():
    averaged, reduced = (
        make(local(SGD(0.1), 1, outer=None)),
        make(keras_dist.DistributedOptimizer(SGD(0.1))),
    )
    for model in (averaged, reduced):
        fit(model)
    assert_close(weights_of(averaged), weights_of(reduced))


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


def test_accumulated_batches_are_one_step():
    optimizer = Adam(0.01, gradient_accumulation_steps=2)
    model = make(local(optimizer, 3, outer=None))
    ended = []
    for x, y in batches_of(keras_dist.rank())[:6]:
        model.train_on_batch(x, y)
        ended.append(model.optimizer._keras_dist.rounds.ended)
    assert ended == [0, 0, 0, 0, 0, 1]
    assert agreed([w.tobytes() for w in weights_of(model)])


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch takes one step in an execution")
def test_a_round_ends_with_an_execution_of_several_steps():
    model = make(local(SGD(0.1), 3, outer=None), steps_per_execution=2)
    fit(model)
    assert model.optimizer._keras_dist.rounds.ended == 2  # after 4 and 7 steps
    keras_dist.verify_replicas(model)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch compiles for minutes")
def test_compiled_steps_are_local_steps():
    model = make(local(SGD(0.1), 3), jit_compile=True)
    fit(model)
    assert_close(weights_of(model), reference(lambda: SGD(0.1), 1.0, 0.5), 2e-6)


def test_updates_of_a_loop_are_local_steps():
    model = make(optimizer := local(SGD(0.1), 3))
    for x, y in batches_of(keras_dist.rank()):
        update_of_loop(model, optimizer, x, y)
    optimizer.finish_round()
    assert_close(weights_of(model), reference(lambda: SGD(0.1), 1.0, 0.5), 2e-6)
    assert agreed([w.tobytes() for w in weights_of(model)])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others have no graph besides XLA")
def test_updates_of_a_graph_are_local_steps():
    import tensorflow as tf

    model = make(optimizer := local(SGD(0.1), 3))
    update = tf.function(lambda x, y: tf_update(model, optimizer, x, y))
    for x, y in batches_of(keras_dist.rank()):
        update(tf.constant(x), tf.constant(y))
    optimizer.finish_round()
    assert_close(weights_of(model), reference(lambda: SGD(0.1), 1.0, 0.5), 2e-6)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others have no graph besides XLA")
def test_updates_outside_of_a_graph_belong_to_its_rounds():
    import tensorflow as tf

    model = make(optimizer := local(SGD(0.1), 3))
    update = tf.function(lambda x, y: tf_update(model, optimizer, x, y))
    for number, (x, y) in enumerate(batches_of(keras_dist.rank())):
        if number < 2:
            update(tf.constant(x), tf.constant(y))
        else:
            tf_update(model, optimizer, x, y)
    optimizer.finish_round()
    assert_close(weights_of(model), reference(lambda: SGD(0.1), 1.0, 0.5), 2e-6)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others have no graph besides XLA")
@pytest.mark.parametrize("streaming", [{}, {"fragments": 2, "delay": 1}])
def test_steps_of_other_kinds_have_rounds_of_their_own(streaming):
    import tensorflow as tf

    model = make(optimizer := local(SGD(0.1), 4, **streaming))

    def graph():
        return tf.function(lambda x, y: tf_update(model, optimizer, x, y))

    x, y = batches_of(keras_dist.rank())[0]
    model.train_on_batch(x, y)
    with pytest.raises(Exception, match=r"Call optimizer\.finish_round\(\) before the function"):
        graph()(tf.constant(x), tf.constant(y))
    optimizer.finish_round()
    update = graph()
    for _ in range(2):
        for _ in range(5):
            update(tf.constant(x), tf.constant(y))
        model.train_on_batch(x, y)
    optimizer.finish_round()
    assert agreed([w.tobytes() for w in weights_of(model)])
    before = optimizer._keras_dist.rounds.ended
    fit(model)
    assert optimizer._keras_dist.rounds.ended < before + STEPS  # not one in each step
    assert agreed([w.tobytes() for w in weights_of(model)])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others have no graph besides XLA")
def test_a_graph_that_one_rank_traces_again_counts_its_steps():
    import tensorflow as tf

    model = make(optimizer := local(SGD(0.1), 10, outer=None))
    update = tf.function(lambda x, y: tf_update(model, optimizer, x, y))
    for number, (x, y) in enumerate(batches_of(keras_dist.rank())):
        rows = slice(0, BATCH - (number == 2 and keras_dist.rank() > 0))
        update(tf.constant(x[rows]), tf.constant(y[rows]))
    everyone = keras_dist.allgather_object(weights_of(model))
    optimizer.finish_round()
    expected = [np.mean(values, axis=0) for values in zip(*everyone, strict=True)]
    assert_close(weights_of(model), expected, 2e-6)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others broadcast before the first step")
def test_weights_may_be_broadcast_after_the_first_step():
    import keras_dist.tensorflow as hvd

    model = make(optimizer := local(SGD(0.1), 3, outer=None))
    model.set_weights([weight + keras_dist.rank() for weight in model.get_weights()])
    for number, (x, y) in enumerate(batches_of(keras_dist.rank())):
        tf_update(model, optimizer, x, y)
        if number == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
    optimizer.finish_round()
    assert agreed([w.tobytes() for w in weights_of(model)])


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


class Stop(keras.callbacks.Callback):
    """Stops training on one rank, in the middle of a round."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and keras_dist.rank() == keras_dist.size() - 1:
            self.model.stop_training = True


def test_a_stop_on_one_rank_takes_effect_at_the_end_of_the_round():
    model = make(local(SGD(0.1), 3, outer=None))
    fit(model, epochs=2, callbacks=[Stop()])
    assert int(model.optimizer.iterations) == 6
    assert model.optimizer._keras_dist.rounds.ended == 2
    keras_dist.verify_replicas(model)


@pytest.mark.parametrize("others", [3, 6], ids=["in a round", "after a round"])
@pytest.mark.parametrize("uneven", ["continue", "stop"])
def test_ranks_out_of_data_have_the_weights_of_the_others(uneven, others):
    model = make(local(SGD(0.1), 2, outer=None))
    x, y = data_of(keras_dist.rank())
    count = BATCH * (STEPS if keras_dist.rank() == 0 else others)
    callbacks = keras_dist.callbacks(uneven=uneven)
    model.fit(x[:count], y[:count], BATCH, 2, shuffle=False, verbose=0, callbacks=callbacks)
    keras_dist.verify_replicas(model)


def test_metrics_are_those_of_all_samples():
    model = make(local(SGD(0.0), 3), metrics=["accuracy"])
    logs = fit(model, validation_data=data_of(keras_dist.rank())).history
    x, y = (
        np.concatenate(each) for each in zip(*map(data_of, range(keras_dist.size())), strict=True)
    )
    loss, accuracy = make(SGD(0.0), metrics=["accuracy"]).evaluate(x, y, verbose=0)
    found = [logs[name][0] for name in ("loss", "accuracy", "val_loss", "val_accuracy")]
    np.testing.assert_allclose(found, [loss, accuracy] * 2, rtol=1e-5)


def test_averaged_weights_and_schedules():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = make(local(SGD(schedule, use_ema=True, ema_momentum=0.5, clipnorm=0.1), 3))
    fit(model, epochs=2)
    keras_dist.verify_replicas(model)
    assert agreed([to_numpy(w).tobytes() for w in model.weights])


def test_loss_scales_of_ranks_are_their_own():
    model = make(local(keras.optimizers.LossScaleOptimizer(SGD(0.1)), 3, outer=None))
    fit(model)
    plain = make(local(SGD(0.1), 3, outer=None))
    fit(plain)
    assert_close(weights_of(model), weights_of(plain))
    assert model.optimizer._keras_dist.rounds.ended == 3


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
    model = make(local(SGD(0.1), 3, outer=SGD(0.5)))
    fit(model)
    if keras_dist.rank() == 0:
        model.save(shared_tmp_path / "model.keras")
    keras_dist.barrier()
    loaded = keras_dist.load_model(shared_tmp_path / "model.keras")
    for each in (model, loaded):
        fit(each)
    for value, wanted in zip(weights_of(loaded), weights_of(model), strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert loaded.optimizer._keras_dist.rounds.outers[0].learning_rate == 0.5


@pytest.mark.skipif(keras_dist.size() == 1, reason="of several ranks")
def test_other_numbers_of_steps_on_a_rank_are_an_error():
    model = make(local(SGD(0.1), 2 + keras_dist.rank() % 2))
    with pytest.raises(errors.MismatchError, match="the same local_steps"):
        model.train_on_batch(*batches_of(0)[0])
