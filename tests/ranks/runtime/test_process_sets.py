"""Process sets: creation, collectives of their ranks, and training."""

import threading

import keras
import numpy as np
import pytest
from mpi4py import MPI
from small_training import make_data, make_model, weights_of

import keras_dist
from keras_dist import ProcessSet, errors, runtime

pytestmark = pytest.mark.jobs("openmpi-3", "torch-4")

RANK, SIZE = keras_dist.rank, keras_dist.size
world = MPI.COMM_WORLD
LARGE = 100_003


@pytest.fixture
def fresh():
    """Leaves keras_dist before the test and rejoins the world after it."""
    keras_dist.shutdown()
    yield
    keras_dist.shutdown()
    keras_dist.init()


@pytest.fixture
def add():
    """`add_process_set`; the sets are removed after the test."""
    added = []

    def add(ranks):
        added.append(keras_dist.add_process_set(ranks))
        return added[-1]

    yield add
    for process_set in added:
        keras_dist.remove_process_set(process_set)


def several(count=2):
    if world.size < count:
        pytest.skip(f"wants {count} ranks")


# --- Sets of init


def test_the_set_of_all_ranks_comes_and_goes_with_init(fresh):
    everyone = keras_dist.global_process_set
    assert (everyone.process_set_id, everyone.ranks, everyone.size()) == (None, None, None)
    assert (everyone.rank(), everyone.included(), everyone.mpi_comm) == (None, None, None)
    assert keras_dist.allreduce(1.0, "sum", process_set=everyone) == SIZE()
    assert (everyone.process_set_id, everyone.ranks) == (0, list(range(SIZE())))
    assert (everyone.rank(), everyone.size(), everyone.included()) == (RANK(), SIZE(), True)
    assert not keras_dist.remove_process_set(everyone)
    assert everyone.size() == SIZE()
    keras_dist.shutdown()
    mine = world.Dup()
    keras_dist.init(mine, process_sets="dynamic")
    assert everyone.mpi_comm is mine
    assert everyone.ranks == list(range(SIZE()))
    keras_dist.shutdown()
    mine.Free()


def test_sets_lose_their_ids_at_shutdown_and_may_come_again(fresh):
    several()
    first, rest = sets = [ProcessSet([0]), ProcessSet(range(1, world.size))]
    mine = rest if world.rank else first
    for _ in range(2):
        assert (first.ranks, first.process_set_id, first.size()) == ([0], None, None)
        assert (first.rank(), first.included()) == (None, None)
        keras_dist.init(process_sets=sets)
        assert [one.process_set_id for one in sets] == [1, 2]
        assert mine.rank() == (world.rank - 1 if world.rank else 0)
        assert keras_dist.allreduce(1.0, "sum", process_set=mine) == mine.size()
        assert [one.included() for one in sets] == [world.rank == 0, world.rank > 0]
        keras_dist.init(process_sets=sets)
        assert [one.process_set_id for one in sets] == [1, 2]
        keras_dist.shutdown()
    with pytest.raises(errors.ArgumentError, match="or has been removed"):
        keras_dist.barrier(process_set=first)
    keras_dist.init(process_sets=[late := ProcessSet(range(world.size - 1))])  # has begun already
    assert late.process_set_id == 1


def test_what_init_refuses_leaves_it_to_be_called_again(fresh):
    several()
    odd = world.rank == world.size - 1
    part = world.Split(color=world.rank == 0, key=world.rank)
    every = ProcessSet(range(world.size))
    equal, other, of_kind = errors.ArgumentError, errors.MismatchError, errors.ArgumentTypeError
    for kind, text, sets in [
        (equal, "no two of them equal", [ProcessSet([0, 1]), ProcessSet([1, 0])]),
        (equal, "no two of them equal", [every]),
        (other, "Expected 1 process sets .* Received: 0", None if odd else [ProcessSet([0])]),
        (other, "number 0 to be made from rank 0 as on rank 0", [ProcessSet([int(odd)])]),
        (of_kind, f"rank {world.size - 1} of {world.size}", 3 if odd else [ProcessSet([0])]),
        (
            other,
            r"as on rank 0\. Received: a communicator of",
            [ProcessSet(part if world.rank else world)],
        ),
        (other, "made from rank 0 as on rank 0", [ProcessSet(part if world.rank else [0])]),
        (equal, r"MPI\.COMM_NULL on every rank", [ProcessSet(MPI.COMM_NULL)]),
    ]:
        with pytest.raises(kind, match=text):
            keras_dist.init(process_sets=sets)
        assert not keras_dist.is_initialized()
    right = ProcessSet([0])
    keras_dist.init(process_sets=[right])
    assert right.process_set_id == 1
    assert keras_dist.allreduce(1.0, "sum") == world.size
    keras_dist.shutdown()
    part.Free()


# --- Sets of communicators


def test_each_rank_passes_the_communicator_that_it_is_in(fresh):
    several()
    part = world.Split(color=world.rank == 0, key=-world.rank)
    mine = ProcessSet(part)
    assert mine.ranks is None
    keras_dist.init(world, process_sets=[mine])
    assert mine.process_set_id == (1 if world.rank == 0 else 2)
    assert mine.ranks == ([0] if world.rank == 0 else list(range(1, world.size)))
    assert mine.mpi_comm is part
    gathered = keras_dist.allgather([world.rank], process_set=mine)
    np.testing.assert_array_equal(gathered, mine.ranks)
    assert keras_dist.remove_process_set(mine)
    assert keras_dist.add_process_set([0]).process_set_id == 1
    part.Free()
    keras_dist.shutdown()
    some = ProcessSet(world.Split(color=0 if world.rank else MPI.UNDEFINED, key=world.rank))
    keras_dist.init(process_sets=[some])
    assert (some.process_set_id, some.ranks) == (1, list(range(1, world.size)))
    assert some.included() == (world.rank > 0)


def test_a_communicator_of_part_of_the_world(fresh):
    several(3)
    job = world.Split(color=0 if world.rank else 1, key=world.rank)
    keras_dist.init(job)
    if world.rank:
        some = keras_dist.add_process_set([SIZE() - 1])
        assert some.included() == (world.rank == world.size - 1)
        with pytest.raises(errors.ArgumentError, match="not all of which are"):
            keras_dist.add_process_set(ProcessSet(world))
        assert keras_dist.allreduce(1.0, "sum") == SIZE()
    keras_dist.shutdown()
    job.Free()


# --- Adding and removing


def test_add_remove_and_reuse(add):
    several(3)
    sets = [add(ranks) for ranks in ([0], [0, 1], ProcessSet([2, 1]))]
    assert [one.process_set_id for one in sets] == [1, 2, 3]
    assert sets[2].ranks == [1, 2]
    assert keras_dist.remove_process_set(sets[1])
    assert (sets[1].process_set_id, sets[1].size(), sets[1].ranks) == (None, None, [0, 1])
    assert not keras_dist.remove_process_set(sets[1])
    again = add([2])
    assert again.process_set_id == 2
    assert add(sets[1]).process_set_id == 4
    assert len(set(keras_dist.allgather_object(str(again)))) == 1
    assert str(again) == "ProcessSet(process_set_id=2, ranks=[2], mpi_comm=None)"
    if again.included():
        assert keras_dist.allreduce(7, "sum", process_set=again) == 7


def test_ranks_that_remove_different_sets(add):
    several()
    first, second = add([0]), add([1])
    for kind, text, wrong in [
        (errors.MismatchError, r"to remove rank 0 as on rank 0\. Received: rank 1\.", second),
        (errors.MismatchError, "to remove rank 0 as on rank 0", keras_dist.global_process_set),
        (errors.ArgumentTypeError, "'first'", "first"),
    ]:
        with pytest.raises(kind, match=text):
            keras_dist.remove_process_set(wrong if RANK() == SIZE() - 1 else first)
        assert keras_dist.allreduce(1.0, "sum") == SIZE()
    if first.included():
        keras_dist.barrier(process_set=first)


# --- Collectives; the values of all of them are in `test_faces`


def test_a_difference_within_a_set_names_ranks_of_the_job(add):
    several(3)
    some, last = add(range(1, SIZE())), SIZE() - 1
    if some.included():
        with pytest.raises(errors.MismatchError) as caught:
            keras_dist.allreduce(np.zeros(3 if RANK() == last else 2), process_set=some)
        assert str(caught.value).startswith(
            f"[rank {last} of {SIZE()}] Expected 'value' with shape (2,) as on rank 1. "
            "Received: (3,)."
        )
        assert runtime.communicator().faults.mismatch == str(caught.value)
        assert keras_dist.allreduce(1, "sum", process_set=some) == some.size()
    assert keras_dist.allreduce(1, "sum") == SIZE()


# --- Concurrent sets


def test_overlapping_sets_from_several_threads(add):
    several(3)
    sets = [add([0, 1]), add([1, 2]), add([0, 2])]
    mine = [one for one in sets if one.included()]
    for some in mine:  # one after the other
        result = keras_dist.allreduce(np.full(LARGE, RANK()), "sum", process_set=some)
        assert (result == sum(some.ranks)).all()
    assert keras_dist.allreduce(1, "sum") == SIZE()
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI allows one thread at a time")
    results = {}

    def work(some):
        results[some.process_set_id] = [
            keras_dist.allreduce(np.full(count, RANK()), "sum", process_set=some)
            for count in (1, LARGE) * 5
        ]

    # Started in different orders on different ranks: no set may wait for another one.
    threads = [threading.Thread(target=work, args=(one,)) for one in mine[:: 1 - 2 * (RANK() % 2)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for some in mine:
        assert all((r == sum(some.ranks)).all() for r in results[some.process_set_id])
        assert len(results[some.process_set_id]) == 10


# --- Training


def test_rows_of_a_gradient_are_averaged_over_the_set_alone(add):
    several(3)
    if keras.backend.backend() != "tensorflow":
        pytest.skip("no other backend gives a gradient as rows")
    import tensorflow as tf

    some = add(range(1, SIZE()))
    table = keras.Variable(np.zeros((SIZE() + 1, 2), "f4"))
    places, shape = tf.constant([0, RANK() + 1]), tf.constant([SIZE() + 1, 2])
    rows = tf.IndexedSlices(tf.ones((2, 2)), places, shape)
    wrapped = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=some)
    wrapped.apply([rows], [table])
    # A reduction with ranks outside of the set would match this one.
    tables = keras_dist.allgather_object(np.array(table))
    own = np.zeros((SIZE() + 1, 2))
    own[[0, 1]] = -1
    np.testing.assert_array_equal(tables[0], own)  # trains alone
    for one in tables[1:]:
        np.testing.assert_allclose(one[0], -1)
        np.testing.assert_array_equal(one[1], 0)
        np.testing.assert_allclose(one[2:], -1 / (SIZE() - 1))


def test_fit_with_an_optimizer_of_a_set(add):
    several()
    some = add(range(1, SIZE()))
    x, y = make_data(16, seed=RANK())
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=some)
    model = make_model(optimizer)
    plain = make_model(keras.optimizers.SGD(0.1))
    for one in (model, plain):
        one.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    weights = [w.tobytes() for w in weights_of(model)]
    if not some.included():
        for own, alone in zip(weights_of(model), weights_of(plain), strict=True):
            np.testing.assert_allclose(own, alone, rtol=1e-6)
        return
    everyone = keras_dist.allgather_object(weights, process_set=some)
    assert all(other == everyone[0] for other in everyone)


def test_an_optimizer_needs_a_set_with_an_id(add):
    several()
    with pytest.raises(errors.ArgumentError, match="never added"):
        keras_dist.DistributedOptimizer(keras.optimizers.SGD(), process_set=ProcessSet([0]))
    some = add([0])
    model = make_model(keras_dist.DistributedOptimizer(keras.optimizers.SGD(), process_set=some))
    keras_dist.remove_process_set(some)
    x, y = make_data(4)
    with pytest.raises(errors.ArgumentError, match="has been removed"):
        model.fit(x, y, verbose=0)
