"""Ranks, sizes, communicators."""

import dataclasses
import os

import pytest
from mpi4py import MPI

import keras_dist
from keras_dist import config, errors, runtime

pytestmark = pytest.mark.jobs("engine", "tensorflow-1")

world = MPI.COMM_WORLD


@pytest.fixture
def fresh():
    """Leaves keras_dist before the test and rejoins the world after it."""
    keras_dist.shutdown()
    yield
    keras_dist.shutdown()
    keras_dist.init()


def test_ranks_are_those_of_mpi():
    assert keras_dist.rank() == world.rank
    assert keras_dist.size() == world.size


def test_one_node():
    assert keras_dist.local_rank() == world.rank
    assert keras_dist.local_size() == world.size
    assert keras_dist.cross_rank() == 0
    assert keras_dist.cross_size() == 1
    assert keras_dist.is_homogeneous()


def test_initialised_at_first_use(fresh):
    assert not keras_dist.is_initialized()
    assert keras_dist.size() == world.size
    assert keras_dist.is_initialized()


def test_init_again_does_nothing(fresh):
    keras_dist.init()
    first = runtime.communicator()
    keras_dist.init()
    assert runtime.communicator() is first


def test_shutdown_and_init_again(fresh):
    for _ in range(3):
        keras_dist.init()
        assert keras_dist.allreduce(1.0, "sum") == world.size
        keras_dist.shutdown()
        assert not keras_dist.is_initialized()


def test_the_communicator_is_a_duplicate(fresh):
    mine = world.Dup()
    keras_dist.init(mine)
    assert MPI.Comm.Compare(runtime.communicator().world, mine) == MPI.CONGRUENT
    mine.Free()
    assert keras_dist.allreduce(1.0, "sum") == world.size


def test_part_of_the_world(fresh):
    half = world.Split(color=world.rank % 2, key=world.rank)
    keras_dist.init(half)
    assert keras_dist.size() == half.size
    assert keras_dist.allreduce(1.0, "sum") == half.size
    keras_dist.shutdown()
    half.Free()


def test_a_list_of_ranks(fresh):
    keras_dist.init([world.rank])
    assert (keras_dist.rank(), keras_dist.size()) == (0, 1)
    keras_dist.shutdown()
    keras_dist.init(list(range(world.size)))
    assert keras_dist.size() == world.size


@pytest.mark.parametrize("comm", ["world", 3, [0.5]])
def test_other_objects_than_communicators_are_refused(fresh, comm):
    with pytest.raises(errors.ArgumentTypeError, match=r"mpi4py.MPI.Comm or a list of ranks"):
        keras_dist.init(comm)
    assert not keras_dist.is_initialized()


def test_a_list_without_this_rank(fresh):
    with pytest.raises(errors.ArgumentError, match="this rank included"):
        keras_dist.init([world.size])


def test_threads_are_this_ranks_share_of_the_cores():
    import tensorflow as tf

    cores = sorted(os.sched_getaffinity(0))
    everyone = world.allgather(cores)
    share = sum(1 / sum(core in others for others in everyone) for core in cores)
    expected = max(1, int(share + 1e-6))
    if world.size > 1:
        chosen = tf.config.threading.get_intra_op_parallelism_threads()
        assert (chosen or int(os.environ["TF_NUM_INTRAOP_THREADS"])) == expected
        # A host call that runs a graph needs a second thread.
        assert int(os.environ["TF_NUM_INTEROP_THREADS"]) == max(expected, 2)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("bucket_nbytes", (1, 2)),
        ("reduce", ("copy", "mpi")),
        ("reduction", ("ordered", "library")),
        ("compression", ("none", "fp16")),
    ],
)
def test_different_settings_are_found_before_data_moves(monkeypatch, field, values):
    if world.size == 1:
        pytest.skip("one rank cannot differ")
    keras_dist.shutdown()
    value = values[world.rank == world.size - 1]
    settings = dataclasses.replace(config.settings(), **{field: value})
    with monkeypatch.context() as patch:
        patch.setattr(config, "settings", lambda: settings)
        variable = f"KERAS_DIST_{field.upper()}"
        with pytest.raises(errors.MismatchError, match=f"{variable}={values[0]} as on rank 0"):
            keras_dist.init()
        assert not keras_dist.is_initialized()
    keras_dist.init()
    assert keras_dist.allreduce(1.0, "sum") == world.size
