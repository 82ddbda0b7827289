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


def test_ranks_are_those_of_mpi_on_one_node():
    assert (keras_dist.rank(), keras_dist.size()) == (world.rank, world.size)
    assert (keras_dist.local_rank(), keras_dist.local_size()) == (world.rank, world.size)
    assert (keras_dist.cross_rank(), keras_dist.cross_size()) == (0, 1)
    assert keras_dist.is_homogeneous()


def test_first_use_and_init_begin_and_shutdown_ends(fresh):
    assert not keras_dist.is_initialized()
    assert keras_dist.size() == world.size
    for _ in range(3):
        assert keras_dist.is_initialized()
        first = runtime.communicator()
        keras_dist.init()  # again: does nothing
        assert runtime.communicator() is first
        assert keras_dist.allreduce(1.0, "sum") == world.size
        keras_dist.shutdown()
        assert not keras_dist.is_initialized()
        keras_dist.init()


def test_a_bad_argument_of_the_call_that_initializes_is_an_error_on_all_ranks(fresh):
    with pytest.raises(errors.ArgumentError, match="Received: 'total'"):
        keras_dist.allreduce(1.0, "total" if world.rank == world.size - 1 else "sum")
    assert keras_dist.allreduce(2.0, "sum") == 2 * world.size


def test_communicators_are_duplicated(fresh):
    mine = world.Dup()
    keras_dist.init(mine)
    assert MPI.Comm.Compare(runtime.communicator().world, mine) == MPI.CONGRUENT
    mine.Free()
    assert keras_dist.allreduce(1.0, "sum") == world.size
    keras_dist.shutdown()
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


@pytest.mark.parametrize(
    ("comm", "text"),
    [
        *((wrong, r"mpi4py.MPI.Comm or a list of ranks") for wrong in ("world", 3, [0.5])),
        ([world.size], "this rank included"),
    ],
)
def test_what_does_not_say_which_ranks_take_part_is_refused(fresh, comm, text):
    kind = errors.ArgumentError if text.startswith("this") else errors.ArgumentTypeError
    with pytest.raises(kind, match=text):
        keras_dist.init(comm)
    assert not keras_dist.is_initialized()


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
