"""Queued collectives: the results of the blocking forms, one order, no lost errors."""

import concurrent.futures
import functools
import gc
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from test_collectives import odd_one, raised, several

import keras_dist
from keras_dist import errors, runtime

pytestmark = pytest.mark.jobs("engine")

RANK, SIZE = keras_dist.rank, keras_dist.size


def test_queueing_does_not_wait_for_other_ranks():
    several()
    # Outside keras_dist, the other ranks wait for rank 0, which queues first.
    first = RANK() == 0
    handle = keras_dist.allreduce_async(1.0, "sum") if first else None
    done = MPI.COMM_WORLD.bcast(first and keras_dist.poll(handle))
    assert done is False
    handle = handle or keras_dist.allreduce_async(1.0, "sum")
    assert keras_dist.synchronize(handle) == SIZE()


def test_training_goes_on_among_queued_and_named_operations():
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    late = np.random.default_rng(RANK())
    x = np.random.default_rng(RANK()).standard_normal((8, 3)).astype("float32")
    handles = []

    class Queue(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            handles.append(keras_dist.allreduce_async(np.full(batch + 1, 1.0), "sum"))
            if late.random() < 0.3:  # ranks are late in turn
                time.sleep(late.uniform(0, 0.003))

    named = [keras_dist.allreduce_async(1.0, "sum", "a")] if RANK() == 0 else []
    callbacks = keras_dist.callbacks(Queue())
    model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    named += [] if RANK() == 0 else [keras_dist.allreduce_async(1.0, "sum", "a")]
    assert len(handles) == 8
    assert all((keras_dist.synchronize(handle) == SIZE()).all() for handle in handles + named)
    weights = [weight.tobytes() for weight in model.get_weights()]
    assert len(set(keras_dist.allgather_object(tuple(weights)))) == 1


def test_an_operation_that_gives_way_leaves_those_of_other_ranks_as_they_are():
    several()
    first = RANK() == 0
    # Both have the same shared memory, cut into other slices.
    small, large = np.zeros(150_000, np.int16), np.full(40_001, RANK() + 1.0)
    for step in range(4):  # repeated calls take a shorter path
        keras_dist.barrier()
        if first:
            time.sleep(0.2)  # the others have published, and wait
            queued = keras_dist.allreduce_async(small, "sum", f"small {step}")
        result = keras_dist.allreduce(large, "sum")
        if not first:
            queued = keras_dist.allreduce_async(small, "sum", f"small {step}")
        assert (result == SIZE() * (SIZE() + 1) / 2).all()
        assert not keras_dist.synchronize(queued).any()


def test_a_nested_collective_does_not_deadlock():
    class Value:
        """Calls a collective while it is converted to an array."""

        def __array__(self, dtype=None, copy=None):
            return keras_dist.allgather(np.array([RANK()]))

    ranks = np.arange(SIZE())
    handle = keras_dist.allreduce_async(Value(), "sum")
    after = keras_dist.allreduce_async(1.0, "sum")
    np.testing.assert_array_equal(keras_dist.synchronize(handle), ranks * SIZE())
    assert keras_dist.synchronize(after) == SIZE()


def test_threads_of_one_rank_take_turns():
    # The order of threads differs between ranks, but all threads call the same operations.
    def work(_):
        for _ in range(20):
            results.append(float(keras_dist.synchronize(keras_dist.allreduce_async(1.0, "sum"))))
            results.append(float(keras_dist.allreduce(1.0, "sum")))

    results = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert results == [SIZE()] * 120


# --- Errors


def test_an_error_is_raised_by_synchronize():
    before = keras_dist.allreduce_async(1.0, "sum")
    bad = keras_dist.allreduce_async(1.0, "mean")
    worse = keras_dist.sparse_allreduce_async(np.zeros(2), odd_one([1, 2], [1, 2, 3]))
    after = keras_dist.allreduce_async(2.0, "sum")
    assert keras_dist.synchronize(after) == 2 * SIZE()
    assert keras_dist.synchronize(before) == SIZE()
    for _ in range(2):  # raised at every call
        texts = raised(errors.ArgumentError, lambda: keras_dist.synchronize(bad))
        assert all("op to be one of average" in text for text in texts)
        texts = raised(errors.ArgumentError, worse.wait)
        assert len(set(texts)) == 1
    assert keras_dist.poll(bad)
    assert keras_dist.allreduce(1.0, "sum") == SIZE()


@pytest.mark.parametrize("dropped", ["at once", "after its end"])
def test_an_error_that_is_not_raised_is_logged(caplog, dropped):
    handle = keras_dist.broadcast_async(1.0, root_rank=SIZE())
    if dropped == "after its end":
        while not handle.done():
            time.sleep(0.001)
        assert not caplog.records
    del handle
    keras_dist.barrier()
    for _ in range(1000):  # the engine's thread may still hold a reference
        if not caplog.records:
            time.sleep(0.005)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "A queued broadcast that nobody waited for failed: ArgumentError: " in caplog.text
    assert f"[rank {RANK()} of {SIZE()}] Expected root_rank to be a rank of this" in caplog.text


def test_an_error_that_was_raised_is_not_logged(caplog):
    handle = keras_dist.broadcast_async(1.0, root_rank=SIZE())
    with pytest.raises(errors.ArgumentError):
        handle.wait()
    del handle
    gc.collect()
    assert not caplog.records


def test_invalid_arguments_on_one_rank_keep_ranks_in_step():
    several()
    wrong = {"bad": 1}, {"process_set": "nope"}
    blocking = functools.partial(keras_dist.allreduce, 1.0)
    for operation in lambda **how: keras_dist.allreduce_async(1.0, **how).wait(), blocking:
        for given in wrong:
            before = keras_dist.allreduce_async(1.0, "sum")
            with pytest.raises((TypeError, errors.ArgumentError), match=r"bad|nope"):
                operation(**odd_one({}, given))
            assert keras_dist.allreduce(2.0, "sum") == 2 * SIZE()
            assert keras_dist.synchronize(before) == SIZE()


# --- Start and shutdown


@pytest.fixture
def fresh():
    """Returns a communicator without queued operations; restores the job afterwards."""
    keras_dist.shutdown()
    yield
    keras_dist.shutdown()
    keras_dist.init()


def threads():
    return [thread.name for thread in threading.enumerate()].count("keras_dist")


def test_the_thread_starts_with_the_first_operation_and_ends_with_shutdown(fresh):
    size = SIZE()
    keras_dist.allreduce(1.0)
    assert threads() == 0
    assert isinstance(runtime.communicator().lock, type(threading.RLock()))
    for _ in range(2):  # `allreduce_async` initialises again
        handles = [keras_dist.allreduce_async(float(n), "sum") for n in range(20)]
        assert threads() == 1
        keras_dist.shutdown()
        assert threads() == 0
        assert [float(handle.wait()) for handle in handles] == [n * size for n in range(20)]


def test_shutdown_logs_errors_that_were_not_raised(fresh, caplog):
    handle = keras_dist.broadcast_async(1.0, root_rank=-1)
    keras_dist.shutdown()
    assert "A queued broadcast that nobody waited for failed" in caplog.text
    assert handle.done()
