"""`LocalSteps(fragments=..., delay=...)`: averages of parts of the weights, in the background."""

import itertools

import keras
import numpy as np
import pytest
from local_training import BACKEND, STEPS, batches_of, fit, local, make, weights_of_reference
from small_training import agreed, assert_close, make_model, weights_of
from start_jobs import wait_for

import keras_dist
from keras_dist import errors
from keras_dist.training.model_state import to_numpy

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")
in_gpu_memory = pytest.mark.jobs("training-double-torch-2")

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
LENGTH = 4  # steps of a round
CHOICES = [(2, 0), (1, 2), (3, 2), (2, 3)]


@pytest.mark.long
@on_each_backend
@in_gpu_memory
@pytest.mark.jobs("torch-3")
@pytest.mark.parity("local steps: rounds of fragments, also with late averages, equal numpy's")
@pytest.mark.parametrize(("count", "delay"), CHOICES)
def test_rounds_of_fragments_equal_a_reference(count, delay):
    model = make(local(Adam(0.01), LENGTH, fragments=count, delay=delay), normalized=True)
    fit(model, epochs=2)
    how = {"count": count, "delay": delay, "normalized": True, "epochs": 2}
    assert_close(weights_of(model), weights_of_reference(lambda: Adam(0.01), LENGTH, **how), 4e-6)
    assert agreed([to_numpy(w).tobytes() for w in model.weights])
    keras_dist.verify_replicas(model)


@on_each_backend
@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch takes one step in an execution")
def test_executions_of_several_steps_end_rounds():
    options = {"fragments": 3, "delay": 2}
    model = make(local(SGD(0.1), LENGTH, **options), steps_per_execution=3)
    fit(model, epochs=2)
    keras_dist.verify_replicas(model)


@on_each_backend
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


@pytest.mark.jobs("torch-3")
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


def test_other_numbers_of_fragments_than_weights_are_an_error():
    model = make(local(SGD(0.1), LENGTH * 2, fragments=5))
    with pytest.raises(errors.ArgumentError, match="one fragment for each of 4 weights"):
        model.train_on_batch(*batches_of(0)[0])
