"""Process sets: creation, collectives of their ranks, and training."""

import threading

import numpy as np
import pytest
from mpi4py import MPI
from small_training import make_data, make_model, weights_of

import keras_dist
from keras_dist import ProcessSet, errors, runtime

pytestmark = pytest.mark.jobs("engine", "torch-4")

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


def subsets():
    """Sets of 1 to size - 1 ranks: the first, the last, every other rank."""
    size = world.size
    found = [range(n) for n in range(1, size)] + [range(n, size) for n in range(1, size)]
    return sorted({tuple(ranks) for ranks in [*found, range(0, size, 2)] if len(ranks) < size})


def raised_on_all(kind, call):
    """Checks that a call raises an error on every rank, and that the job continues."""
    with pytest.raises(kind) as caught:
        call()
    texts = keras_dist.allgather_object(str(caught.value))
    assert keras_dist.allreduce(1.0, "sum") == SIZE()
    return texts


# --- Properties of sets


def test_the_set_of_all_ranks():
    keras_dist.init()
    everyone = keras_dist.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.ranks == list(range(SIZE()))
    assert (everyone.rank(), everyone.size(), everyone.included()) == (RANK(), SIZE(), True)
    assert keras_dist.allreduce(1.0, "sum", process_set=everyone) == SIZE()


def test_the_set_of_all_ranks_comes_and_goes_with_init(fresh):
    everyone = keras_dist.global_process_set
    assert (everyone.process_set_id, everyone.ranks, everyone.size()) == (None, None, None)
    assert (everyone.rank(), everyone.included(), everyone.mpi_comm) == (None, None, None)
    assert keras_dist.allreduce(1.0, "sum", process_set=everyone) == SIZE()
    assert everyone.size() == SIZE()


def test_a_set_before_it_has_an_id():
    alone = ProcessSet([3, 1])
    assert alone.ranks == [1, 3]
    assert (alone.process_set_id, alone.size(), alone.rank(), alone.included()) == (None,) * 4
    with pytest.raises(errors.ArgumentError, match=r"a set of ranks 1, 3 that was never added"):
        keras_dist.barrier(process_set=alone)


# --- Sets of init


def test_sets_of_init(fresh):
    several()
    first, rest = sets = [ProcessSet([0]), ProcessSet(range(1, world.size))]
    keras_dist.init(process_sets=sets)
    assert [one.process_set_id for one in sets] == [1, 2]
    mine = rest if world.rank else first
    assert mine.rank() == (world.rank - 1 if world.rank else 0)
    assert keras_dist.allreduce(1.0, "sum", process_set=mine) == mine.size()
    assert [one.included() for one in sets] == [world.rank == 0, world.rank > 0]
    keras_dist.init(process_sets=sets)
    assert [one.process_set_id for one in sets] == [1, 2]


def test_sets_lose_their_ids_at_shutdown_and_may_come_again(fresh):
    several()
    kept = ProcessSet(range(1, world.size))
    for _ in range(2):
        keras_dist.init(process_sets=[kept])
        assert kept.process_set_id == 1
        if kept.included():
            assert keras_dist.allreduce(1.0, "sum", process_set=kept) == world.size - 1
        keras_dist.shutdown()
        assert (kept.process_set_id, kept.included()) == (None, None)
    with pytest.raises(errors.ArgumentError, match="or has been removed"):
        keras_dist.barrier(process_set=kept)


def test_dynamic_is_accepted(fresh):
    keras_dist.init(process_sets="dynamic")
    assert keras_dist.global_process_set.ranks == list(range(world.size))


def test_a_set_of_a_later_init_is_added(fresh):
    several()
    keras_dist.init()
    late = ProcessSet([0])
    keras_dist.init(process_sets=[late])
    assert late.process_set_id == 1


def test_equal_sets_are_refused_and_init_may_be_called_again(fresh):
    several()
    for wrong in ([ProcessSet([0, 1]), ProcessSet([1, 0])], [ProcessSet(range(world.size))]):
        with pytest.raises(errors.ArgumentError, match="no two of them equal"):
            keras_dist.init(process_sets=wrong)
        assert not keras_dist.is_initialized()
    right = ProcessSet([0])
    keras_dist.init(process_sets=[right])
    assert right.process_set_id == 1
    assert keras_dist.allreduce(1.0, "sum") == world.size


def test_different_sets_in_init(fresh):
    several()
    odd = world.rank == world.size - 1
    with pytest.raises(errors.MismatchError, match=r"Expected 1 process sets .* Received: 0"):
        keras_dist.init(process_sets=None if odd else [ProcessSet([0])])
    with pytest.raises(errors.MismatchError, match=r"number 0 to be made from rank 0 as on rank 0"):
        keras_dist.init(process_sets=[ProcessSet([1 if odd else 0])])
    with pytest.raises(errors.ArgumentTypeError, match=rf"rank {world.size - 1} of {world.size}"):
        keras_dist.init(process_sets=3 if odd else [ProcessSet([0])])
    keras_dist.init()
    assert keras_dist.allreduce(1.0, "sum") == world.size


# --- Sets of communicators


def test_the_global_set_has_the_communicator_of_init(fresh):
    mine = world.Dup()
    keras_dist.init(mine)
    assert keras_dist.global_process_set.mpi_comm is mine
    keras_dist.shutdown()
    mine.Free()


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


def test_a_rank_in_no_communicator(fresh):
    several()
    part = world.Split(color=0 if world.rank else MPI.UNDEFINED, key=world.rank)
    some = ProcessSet(part)
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
        texts = raised_on_all(
            errors.ArgumentError, lambda: keras_dist.add_process_set(ProcessSet(world))
        )
        assert "not all of which are" in texts[0]
    keras_dist.shutdown()
    job.Free()


def test_communicators_that_do_not_fit(fresh):
    several()
    part = world.Split(color=world.rank == 0, key=world.rank)
    with pytest.raises(errors.MismatchError, match=r"as on rank 0\. Received: a communicator of"):
        keras_dist.init(process_sets=[ProcessSet(world if world.rank == 0 else part)])
    with pytest.raises(errors.MismatchError, match="made from rank 0 as on rank 0"):
        keras_dist.init(process_sets=[ProcessSet(part if world.rank else [0])])
    with pytest.raises(errors.ArgumentError, match=r"MPI\.COMM_NULL on every rank"):
        keras_dist.init(process_sets=[ProcessSet(MPI.COMM_NULL)])
    part.Free()


# --- Adding and removing


def test_add_remove_and_reuse(add):
    several(3)
    sets = [add(ranks) for ranks in ([0], [0, 1], ProcessSet([1, 2]))]
    assert [one.process_set_id for one in sets] == [1, 2, 3]
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


def test_the_set_of_all_ranks_cannot_be_removed():
    assert not keras_dist.remove_process_set(keras_dist.global_process_set)
    assert keras_dist.global_process_set.size() == SIZE()


def test_ranks_that_remove_different_sets(add):
    several()
    first, second = add([0]), add([1])
    odd = RANK() == SIZE() - 1
    wrong = second if odd else first
    texts = raised_on_all(errors.MismatchError, lambda: keras_dist.remove_process_set(wrong))
    assert "to remove rank 0 as on rank 0. Received: rank 1." in texts[0]
    wrong = keras_dist.global_process_set if odd else first
    raised_on_all(errors.MismatchError, lambda: keras_dist.remove_process_set(wrong))
    wrong = "first" if odd else first
    raised_on_all(errors.ArgumentTypeError, lambda: keras_dist.remove_process_set(wrong))
    if first.included():
        keras_dist.barrier(process_set=first)


# --- Collectives; the values of all of them are in `test_faces`


@pytest.fixture(params=subsets() or [(0,)], ids=str)
def some(request, add):
    """A set of some of the ranks."""
    several()
    return add(request.param)


def outside(call):
    """Checks the error on a rank outside of a set."""
    with pytest.raises(errors.ArgumentError, match=r"to be in the process set, rank"):
        call()


def test_results_have_the_same_bits_on_all_ranks_of_the_set(some):
    if some.included():
        mine = np.random.default_rng(RANK()).standard_normal(LARGE).astype(np.float32)
        result = keras_dist.allreduce(mine, process_set=some).tobytes()
        assert len(set(keras_dist.allgather_object(result, process_set=some))) == 1


def test_the_root_is_a_rank_of_the_job(some):
    root = some.ranks[-1]
    mine, place = np.full(3, RANK()), np.full(3, RANK())
    if not some.included():
        outside(lambda: keras_dist.broadcast(mine, root, process_set=some))
        outside(lambda: keras_dist.broadcast_([place], root, process_set=some))
        outside(lambda: keras_dist.broadcast_object(RANK(), root, process_set=some))
        assert (place == RANK()).all()
        return
    assert (keras_dist.broadcast(mine, root, process_set=some) == root).all()
    keras_dist.broadcast_([place], root, process_set=some)
    assert (place == root).all()
    assert keras_dist.broadcast_object(RANK(), root, process_set=some) == root
    stranger = next(r for r in range(SIZE()) if r not in some.ranks)
    for wrong in (stranger, -1, SIZE(), "0"):
        with pytest.raises(
            errors.ArgumentError, match=r"root_rank to be a rank of the process set"
        ):
            keras_dist.broadcast(mine, wrong, process_set=some)
    keras_dist.barrier(process_set=some)


def test_a_difference_within_a_set_names_ranks_of_the_job(some):
    if some.included() and some.size() > 1:
        last = some.ranks[-1]
        with pytest.raises(errors.MismatchError) as caught:
            keras_dist.allreduce(np.zeros(3 if RANK() == last else 2), process_set=some)
        assert str(caught.value).startswith(
            f"[rank {last} of {SIZE()}] Expected 'value' with shape (2,) as on rank "
            f"{some.ranks[0]}. Received: (3,)."
        )
        assert runtime.communicator().faults.mismatch == str(caught.value)
        assert keras_dist.allreduce(1, "sum", process_set=some) == some.size()
    assert keras_dist.allreduce(1, "sum") == SIZE()


# --- Concurrent sets


def test_overlapping_sets_one_after_the_other(add):
    several(3)
    pairs = [add([r, r + 1]) for r in range(SIZE() - 1)]
    for turn in range(3):
        for pair in pairs:
            if pair.included():
                result = keras_dist.allreduce(
                    np.full(LARGE, RANK() + turn), "sum", process_set=pair
                )
                assert (result == sum(pair.ranks) + 2 * turn).all()
        assert keras_dist.allreduce(1, "sum") == SIZE()


def test_overlapping_sets_from_several_threads(add):
    several(3)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI allows one thread at a time")
    sets = [add([0, 1]), add([1, 2]), add([0, 2])]
    mine = [one for one in sets if one.included()]
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


def gradients_of(rank, model):
    """The gradients of a rank in a step, one for each weight of a model."""
    return [
        np.random.default_rng([rank, i]).standard_normal(w.shape).astype("f4")
        for i, w in enumerate(model.trainable_weights)
    ]


def test_an_optimizer_averages_over_its_set_alone(some):
    import keras

    model = make_model(keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=some))
    before = weights_of(model)
    gradients = [keras.ops.convert_to_tensor(g) for g in gradients_of(RANK(), model)]
    model.optimizer.apply(gradients, model.trainable_weights)
    ranks = some.ranks if some.included() else [RANK()]  # the other ranks train alone
    means = [
        np.mean([gradients_of(r, model)[i] for r in ranks], axis=0, dtype="f8")
        for i in range(len(before))
    ]
    for was, now, mean in zip(before, weights_of(model), means, strict=True):
        np.testing.assert_allclose(now, was - mean, rtol=0, atol=1e-6)


def test_rows_of_a_gradient_are_averaged_over_the_set_alone(add):
    several(3)
    import keras

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
    import keras

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
    import keras

    with pytest.raises(errors.ArgumentError, match="never added"):
        keras_dist.DistributedOptimizer(keras.optimizers.SGD(), process_set=ProcessSet([0]))
    with pytest.raises(errors.ArgumentTypeError, match=r"a keras_dist\.ProcessSet"):
        keras_dist.DistributedOptimizer(keras.optimizers.SGD(), process_set=[0])
    some = add([0])
    model = make_model(keras_dist.DistributedOptimizer(keras.optimizers.SGD(), process_set=some))
    keras_dist.remove_process_set(some)
    x, y = make_data(4)
    with pytest.raises(errors.ArgumentError, match="has been removed"):
        model.fit(x, y, verbose=0)
