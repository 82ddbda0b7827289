"""Local steps on two levels: ranks of a node average in each step, nodes at the ends of rounds."""

import itertools

import keras
import numpy as np
import pytest
from small_training import agreed, assert_close, make_data, make_model, weights_of

import keras_dist
from keras_dist import LocalSteps, runtime

pytestmark = pytest.mark.jobs("nodes-2x2", "nodes-2+1", "nodes-4x1", "torch-4", "tensorflow-3")

STEPS, BATCH, ROUNDS = 5, 4, (2, 2, 1)


def groups():
    """The ranks of each group: those of each node, or the even and the odd ones of one node."""
    nodes = runtime.communicator().topology.nodes
    ranks = range(keras_dist.size())
    return nodes if len(nodes) > 1 else [list(ranks[0::2]), list(ranks[1::2])]


@pytest.fixture
def within():
    """What averages in each step: the ranks of a node, or a process set of each group."""
    if len(runtime.communicator().topology.nodes) > 1:
        yield "node"
        sets = [runtime.find_process_set([tuple(each)]) for each in groups()]
    else:
        sets = [keras_dist.add_process_set(each) for each in groups()]
        [own] = [each for each in sets if each.included()]
        yield own
    for each in sets:
        keras_dist.remove_process_set(each)


def make(within, steps=2, **streaming):
    steps = LocalSteps(steps, within=within, **streaming)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return make_model(keras_dist.DistributedOptimizer(optimizer, local_steps=steps))


def batches_of(rank):
    x, y = make_data(STEPS * BATCH, seed=10 + rank)
    return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]


def reference():
    """Trains a model for each group in this process, on the batches of all of its ranks."""
    models = [make_model(keras.optimizers.SGD(0.1, momentum=0.9)) for _ in groups()]
    anchors = [np.float64(w) for w in weights_of(models[0])]
    velocities = [np.zeros_like(anchor) for anchor in anchors]
    joined = [
        iter(
            [
                tuple(map(np.concatenate, zip(*each, strict=True)))
                for each in zip(*map(batches_of, ranks), strict=True)
            ]
        )
        for ranks in groups()
    ]
    for steps in ROUNDS:
        for model, batches in zip(models, joined, strict=True):
            for x, y in itertools.islice(batches, steps):
                model.train_on_batch(x, y)
        ranks = [len(each) for each in groups()]
        for at, values in enumerate(zip(*map(weights_of, models), strict=True)):
            gradient = anchors[at] - np.average(values, axis=0, weights=ranks)
            velocities[at] = 0.5 * velocities[at] + gradient
            anchors[at] = anchors[at] - (gradient + 0.5 * velocities[at])
        for model in models:
            model.set_weights([anchor.astype("float32") for anchor in anchors])
    return anchors


def test_rounds_of_groups_equal_a_reference(within):
    model = make(within)
    x, y = make_data(STEPS * BATCH, seed=10 + keras_dist.rank())
    callbacks = keras_dist.callbacks()
    model.fit(x, y, BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    assert_close(weights_of(model), reference(), 2e-6)
    keras_dist.verify_replicas(model)


def test_ranks_of_a_group_are_equal_after_each_step(within):
    model = make(within)
    for number, (x, y) in enumerate(batches_of(keras_dist.rank())):
        model.train_on_batch(x, y)
        everyone = keras_dist.allgather_object([w.tobytes() for w in weights_of(model)])
        first = [everyone[ranks[0]] for ranks in groups()]
        for ranks, expected in zip(groups(), first, strict=True):
            assert all(everyone[rank] == expected for rank in ranks)
        assert (first[0] == first[1]) == (number % 2 == 1)
    model.optimizer.finish_round()
    assert agreed([w.tobytes() for w in weights_of(model)])


def test_averages_of_fragments_travel_while_ranks_of_a_group_average(within):
    model = make(within, 4, fragments=2, delay=1)
    for x, y in batches_of(keras_dist.rank()):
        model.train_on_batch(x, y)
        everyone = keras_dist.allgather_object([w.tobytes() for w in weights_of(model)])
        for ranks in groups():
            assert all(everyone[rank] == everyone[ranks[0]] for rank in ranks)
    model.optimizer.finish_round()
    assert agreed([w.tobytes() for w in weights_of(model)])
