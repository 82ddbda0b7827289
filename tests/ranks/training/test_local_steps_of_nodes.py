"""Local steps on two levels: ranks of a node average in each step, nodes at the ends of rounds."""

import keras
import pytest
from local_training import fit, local, make, weights_of_reference
from small_training import agreed, assert_close, weights_of

import keras_dist
from keras_dist import runtime

pytestmark = pytest.mark.jobs("nodes-2x2", "nodes-2+1", "torch-4")


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


class Compare(keras.callbacks.Callback):
    """Checks that the ranks of a group are equal after each step; notes whether the groups are."""

    def __init__(self):
        super().__init__()
        self.equal = []

    def on_train_batch_end(self, batch, logs=None):
        weights = [w.tobytes() for w in weights_of(self.model)]
        everyone = keras_dist.allgather_object(weights)
        for ranks in groups():
            assert all(everyone[rank] == everyone[ranks[0]] for rank in ranks)
        self.equal.append(all(each == weights for each in everyone))


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.jobs("tensorflow-3")
def test_rounds_of_groups_equal_a_reference(within):
    model, seen = make(local(sgd(), 2, within=within)), Compare()
    fit(model, callbacks=[seen])
    assert seen.equal[:6] == [False, True] * 3
    assert_close(weights_of(model), weights_of_reference(sgd, 2, groups=groups()), 2e-6)
    keras_dist.verify_replicas(model)


def test_averages_of_fragments_travel_while_ranks_of_a_group_average(within):
    model = make(local(sgd(), 4, within=within, fragments=2, delay=1))
    fit(model, callbacks=[Compare()])
    assert agreed([w.tobytes() for w in weights_of(model)])
