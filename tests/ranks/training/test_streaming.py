"""`LocalSteps(fragments=..., delay=...)`: averages of parts of the weights, in the background."""

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
from small_training import agreed, assert_close, make_model, weights_of
from start_jobs import wait_for

import keras_dist
from keras_dist import errors
from keras_dist.training.fragments import cut
from keras_dist.training.model_state import to_numpy

pytestmark = pytest.mark.jobs("training", "tensorflow-1", "jax-2", "torch-3")

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
LENGTH = 4  # steps of a round
CHOICES = [(2, 0), (3, 0), (1, 2), (2, 2), (3, 2), (2, 3)]
HELD = 0.5  # share of its own weights that a rank keeps


class Streams:
    """Trains the models of all ranks in this process, with rounds computed by numpy."""

    def __init__(self, make_inner, count, delay, normalized=False):
        self.models = [make(make_inner(), normalized) for _ in range(keras_dist.size())]
        weights = self.models[0].weights
        trained = [at for at, weight in enumerate(weights) if weight.trainable]
        parts = cut([weights[at] for at in trained], count)
        known = {id(weight): at for at, weight in enumerate(weights)}
        self.parts = [[known[id(weight)] for weight in part] for part in parts]
        self.parts[-1] += [at for at in range(len(weights)) if at not in trained]
        self.trained, self.delay = trained, delay
        self.anchors = [np.float64(w) for w in weights_of(self.models[0])]
        self.velocities = [np.zeros_like(anchor) for anchor in self.anchors]

    def epoch(self):
        sent, began = {}, [0] * len(self.parts)
        batches = [iter(batches_of(rank)) for rank in range(len(self.models))]
        due = [(number + 1) * LENGTH // len(self.parts) for number in range(len(self.parts))]
        for step in range(1, STEPS + 1):
            for model, mine in zip(self.models, batches, strict=True):
                model.train_on_batch(*next(mine))
            for number, part in enumerate(self.parts):
                if number in sent and step == began[number] + self.delay:
                    self.apply(part, sent.pop(number), HELD)
            for number, part in enumerate(self.parts):
                if step >= due[number] and (step - due[number]) % LENGTH == 0:
                    began[number] = step
                    if self.delay:
                        sent[number] = self.differences(part)
                    else:
                        self.apply(part, self.differences(part))
        for number, part in enumerate(self.parts):
            if number in sent:
                self.apply(part, sent[number], HELD if began[number] < STEPS else 0)
        for number, part in enumerate(self.parts):
            if began[number] < STEPS:
                self.apply(part, self.differences(part))

    def differences(self, part):
        every = [weights_of(model) for model in self.models]
        return [self.anchors[at] - np.mean([mine[at] for mine in every], axis=0) for at in part]

    def apply(self, part, differences, held=0.0):
        for at, difference in zip(part, differences, strict=True):
            step = difference
            if at in self.trained:
                self.velocities[at] = 0.5 * self.velocities[at] + difference
                step = difference + 0.5 * self.velocities[at]
            self.anchors[at] = self.anchors[at] - step
        for model in self.models:
            mine = weights_of(model)
            for at in part:
                mixed = held * mine[at] + (1 - held) * self.anchors[at]
                mine[at] = mixed.astype("float32")
            model.set_weights(mine)


@pytest.mark.parity("local steps: rounds of fragments, also with late averages, equal numpy's")
@pytest.mark.parametrize(("count", "delay"), CHOICES)
def test_rounds_of_fragments_equal_a_reference(count, delay):
    model = make(local(Adam(0.01), LENGTH, fragments=count, delay=delay), normalized=True)
    fit(model, epochs=2)
    expected = Streams(lambda: Adam(0.01), count, delay, normalized=True)
    for _ in range(2):
        expected.epoch()
    assert_close(weights_of(model), expected.anchors, 4e-6)
    assert agreed([to_numpy(w).tobytes() for w in model.weights])
    keras_dist.verify_replicas(model)


@pytest.mark.parametrize(("count", "delay"), [(2, 0), (3, 2)])
def test_updates_of_a_loop(count, delay):
    model = make(optimizer := local(SGD(0.1), LENGTH, fragments=count, delay=delay))
    for x, y in batches_of(keras_dist.rank()):
        update_of_loop(model, optimizer, x, y)
    optimizer.finish_round()
    check(model, count, delay)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others have no graph besides XLA")
@pytest.mark.parametrize(("count", "delay"), [(2, 0), (3, 2)])
def test_updates_of_a_graph(count, delay):
    import tensorflow as tf

    model = make(optimizer := local(SGD(0.1), LENGTH, fragments=count, delay=delay))
    update = tf.function(lambda x, y: tf_update(model, optimizer, x, y))
    for x, y in batches_of(keras_dist.rank()):
        update(tf.constant(x), tf.constant(y))
    optimizer.finish_round()
    check(model, count, delay)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch compiles for minutes")
def test_compiled_steps():
    model = make(local(SGD(0.1), LENGTH, fragments=2, delay=1), jit_compile=True)
    fit(model)
    check(model, 2, 1)


def check(model, count, delay):
    expected = Streams(lambda: SGD(0.1), count, delay)
    expected.epoch()
    assert_close(weights_of(model), expected.anchors, 4e-6)
    assert agreed([w.tobytes() for w in weights_of(model)])


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch takes one step in an execution")
def test_executions_of_several_steps_end_rounds():
    options = {"fragments": 3, "delay": 2}
    model = make(local(SGD(0.1), LENGTH, **options), steps_per_execution=3)
    fit(model, epochs=2)
    keras_dist.verify_replicas(model)


def test_a_rank_takes_steps_while_averages_travel(shared_tmp_path):
    model = make(local(SGD(0.1), LENGTH, fragments=2, delay=2))
    fit(model)
    turns = [shared_tmp_path / str(rank) for rank in range(keras_dist.size())]
    # Each rank waits until the one before has taken steps beyond the end of the first round.
    for turn in turns[: keras_dist.rank()]:
        assert wait_for(turn.exists)
    for x, y in itertools.islice(batches_of(keras_dist.rank()), LENGTH // 2 + 1):
        model.train_on_batch(x, y)
    turns[keras_dist.rank()].touch()
    model.optimizer.finish_round()
    assert agreed([w.tobytes() for w in weights_of(model)])


def test_rounds_that_end_early_without_a_step_change_nothing():
    model = make(optimizer := local(SGD(0.1), LENGTH, fragments=2, delay=2))
    for x, y in batches_of(keras_dist.rank())[:LENGTH]:
        model.train_on_batch(x, y)
    optimizer.finish_round()
    before = [w.tobytes() for w in weights_of(model)]
    optimizer.finish_round()
    assert [w.tobytes() for w in weights_of(model)] == before
    assert agreed(before)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("others", [3, 5, 6])
@pytest.mark.parametrize("uneven", ["continue", "stop"])
def test_ranks_out_of_data_have_the_weights_of_the_others(uneven, others, delay):
    model = make(local(SGD(0.1), LENGTH, fragments=2, delay=delay))
    x, y = data_of(keras_dist.rank())
    count = BATCH * (STEPS if keras_dist.rank() == 0 else others)
    callbacks = keras_dist.callbacks(uneven=uneven)
    model.fit(x[:count], y[:count], BATCH, 2, shuffle=False, verbose=0, callbacks=callbacks)
    keras_dist.verify_replicas(model)


@pytest.mark.parametrize(("compression", "levels"), [("int8", 127), ("int4", 7), ("topk", None)])
def test_differences_are_compressed_and_their_errors_kept(compression, levels):
    def trained(how):
        optimizer = local(SGD(0.1), STEPS, outer=None, compression=how)
        model = make_model(optimizer, width=256)
        before = weights_of(model)[0]
        fit(model)
        assert agreed([w.tobytes() for w in weights_of(model)])
        return model, weights_of(model)[0], before

    _, expected, before = trained("none")
    model, found, _ = trained(compression)
    errors_kept = list(model.optimizer._keras_dist.feedback.errors.values())
    assert len(errors_kept) == (keras_dist.size() > 1)  # the largest kernel
    for error in errors_kept:
        mean = keras_dist.allreduce(error).reshape(found.shape)
        np.testing.assert_allclose(found - mean, expected, atol=1e-6)
        assert found.tobytes() != expected.tobytes()
        if levels:
            largest = keras_dist.allreduce(np.abs(before - expected).max() * 3, op="max")
            assert np.abs(mean).max() <= largest / levels


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_fragments_of_integers_learn(compression):
    steps = {"fragments": 2, "delay": 1}
    model = make_model(local(Adam(0.01), LENGTH, compression=compression, **steps), width=256)
    losses = fit(model, epochs=6).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    keras_dist.verify_replicas(model)


def test_ranks_that_lack_the_bases_of_powersgd_get_those_of_all_fragments():
    def trained(lose):
        steps = {"fragments": 2, "compression": "powersgd(rank=2, min_compression_rate=1)"}
        model = make_model(local(Adam(0.01), LENGTH, **steps), width=16)
        fit(model)
        feedback = model.optimizer._keras_dist.feedback
        if lose:
            feedback.agreed = None
        if lose and keras_dist.rank() > 0:  # as a rank that has begun anew
            feedback.step, feedback.bases = 0, {}
        fit(model)
        assert len(feedback.bases) == (2 if keras_dist.size() > 1 else 0)
        return [weight.tobytes() for weight in weights_of(model)]

    assert trained(lose=True) == trained(lose=False)


class Stop(keras.callbacks.Callback):
    """Stops training on one rank, in the middle of a round."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and keras_dist.rank() == keras_dist.size() - 1:
            self.model.stop_training = True


@pytest.mark.parametrize("delay", [0, 2])
def test_a_stop_on_one_rank_takes_effect_where_the_last_fragment_is_due(delay):
    model = make(local(SGD(0.1), LENGTH, fragments=2, delay=delay))
    fit(model, epochs=2, callbacks=[Stop()])
    assert int(model.optimizer.iterations) == LENGTH
    keras_dist.verify_replicas(model)


def test_other_numbers_of_fragments_than_weights_are_an_error():
    model = make(local(SGD(0.1), LENGTH * 2, fragments=5))
    with pytest.raises(errors.ArgumentError, match="one fragment for each of 4 weights"):
        model.train_on_batch(*batches_of(0)[0])


def test_saved_models_have_the_fragments(shared_tmp_path):
    model = make(local(SGD(0.1), LENGTH, outer=None, fragments=2, delay=1))
    fit(model)
    if keras_dist.rank() == 0:
        model.save(shared_tmp_path / "model.keras")
    keras_dist.barrier()
    loaded = keras_dist.load_model(shared_tmp_path / "model.keras")
    for each in (model, loaded):
        fit(each)
    for value, wanted in zip(weights_of(loaded), weights_of(model), strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert len(loaded.optimizer._keras_dist.rounds.fragments) == 2
