"""Named operations, which match in any order."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from test_collectives import raised, several

import keras_dist
from keras_dist import errors

pytestmark = pytest.mark.jobs("engine", "torch-4")

NAMES = [f"weight {number}" for number in range(12)]


def own_order():
    """Returns the names, in a different order on each rank."""
    return list(np.random.default_rng(keras_dist.rank()).permutation(NAMES))


def value_of(name):
    return np.arange(3.0) + NAMES.index(name)


def test_threads_may_block_in_any_order():
    results = {}

    def reduce(name):
        results[name] = keras_dist.allreduce(value_of(name), "sum", name)

    threads = [threading.Thread(target=reduce, args=(name,)) for name in own_order()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == set(NAMES)
    for name, result in results.items():
        assert (result == keras_dist.size() * value_of(name)).all()


@pytest.mark.parametrize("queued", [False, True])
def test_names_without_a_match_are_an_error_on_every_rank(queued):
    several()
    name = "loss" if keras_dist.rank() == 0 else "accuracy"
    if queued:
        call = keras_dist.allreduce_async(1.0, name=name).wait
    else:
        call = lambda: keras_dist.allreduce(1.0, name=name)  # noqa: E731
    texts = raised(errors.MismatchError, call)
    assert len(set(texts)) == 1
    assert "[rank 1 of " in texts[0]
    assert "name='loss' in allreduce('loss') as on rank 0. Received: name='accuracy'" in texts[0]
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


def test_a_daemon_thread_may_call_the_missing_operation():
    results = {}

    def reduce(name, after=0.0):
        time.sleep(after)
        results[name] = keras_dist.allreduce(value_of(name), "sum", name)

    first, second = NAMES[:2]
    if keras_dist.rank() == 0:
        thread = threading.Thread(target=reduce, args=(second, 0.3), daemon=True)
        thread.start()
        reduce(first)
        thread.join()
    else:
        reduce(second)
        reduce(first)
    for name, result in results.items():
        assert (result == keras_dist.size() * value_of(name)).all()


def test_an_invalid_argument_is_an_error_of_its_operation_only():
    several()
    is_first = keras_dist.rank() == 0
    handles = {}
    for name in "ab" if is_first else "ba":
        op = "median" if is_first and name == "a" else "sum"
        handles[name] = keras_dist.allreduce_async(1.0, op, name)
    assert handles["b"].wait() == keras_dist.size()
    assert "median" in raised(errors.ArgumentError, handles["a"].wait)[-1]
    if is_first:
        handles["c"] = keras_dist.allreduce_async(1.0, "sum", "c")
    with pytest.raises(errors.ArgumentError, match="median"):
        keras_dist.allreduce(1.0, "median" if is_first else "sum", "d")
    if not is_first:
        handles["c"] = keras_dist.allreduce_async(1.0, "sum", "c")
    assert handles["c"].wait() == keras_dist.size()


def test_different_operations_with_one_name_are_an_error():
    several()
    handles = {
        name: keras_dist.allreduce_async(np.zeros(1 + (name == "b") * keras_dist.rank()), name=name)
        for name in ("ab" if keras_dist.rank() == 0 else "ba")
    }
    assert (handles["a"].wait() == 0).all()
    texts = raised(errors.MismatchError, handles["b"].wait)
    assert "Expected 'b' with shape (1,) as on rank 0. Received: (2,)" in texts[0]


def test_a_process_set_has_its_own_names():
    if keras_dist.size() < 3:
        pytest.skip("needs three ranks")
    some = keras_dist.add_process_set([0, 1])
    if some.included():
        order = NAMES[:4] if keras_dist.rank() == 0 else NAMES[3::-1]
        handles = {
            n: keras_dist.allreduce_async(value_of(n), name=n, process_set=some) for n in order
        }
        assert all((handles[name].wait() == value_of(name)).all() for name in order)
    assert keras_dist.remove_process_set(some)


# --- Named operations among those without a name

MEETINGS = {
    "barrier": keras_dist.barrier,
    "broadcast_object": lambda: keras_dist.broadcast_object("here"),
    "allgather_object": lambda: keras_dist.allgather_object("here"),
    "allreduce": lambda: keras_dist.allreduce(1.0),
    "allreduce_async": lambda: keras_dist.allreduce_async(1.0).wait(),
}


def test_training_goes_on_among_named_operations():
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, first = np.ones((8, 3), "float32"), keras_dist.rank() == 0
    handles = [keras_dist.allreduce_async(1.0, "sum", "a")] if first else []
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=keras_dist.callbacks())
    handles += [] if first else [keras_dist.allreduce_async(1.0, "sum", "a")]
    assert handles[0].wait() == keras_dist.size()


WAITS = {
    **MEETINGS,
    "a name": lambda: keras_dist.allreduce(1.0, name="a"),
    "a handle": lambda: keras_dist.allreduce_async(1.0, name="a").wait(),
    "a later handle": lambda: [
        keras_dist.allreduce_async(1.0, name=name) for name in ("a", "b")
    ].pop().wait(),
    "join": keras_dist.join,
}


@pytest.mark.parametrize("name", [None, "bad"])
@pytest.mark.parametrize("wait", WAITS)
def test_an_error_on_one_rank_ends_the_wait_of_all(wait, name):
    several()
    if keras_dist.rank() == keras_dist.size() - 1:
        call = lambda: keras_dist.allreduce(1.0, "median", name)  # noqa: E731
    else:
        call = WAITS[wait]
    with pytest.raises(errors.KerasDistError, match="median"):
        call()
    assert MPI.COMM_WORLD.allreduce(1) == keras_dist.size()
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


def test_a_rank_that_queued_raises_the_error_of_the_rank_that_blocks():
    several()
    if keras_dist.rank() == 0:  # the operation has no name, so it does not match the barrier
        handle = keras_dist.allreduce_async(1.0)
    texts = raised_by_mpi(keras_dist.barrier)
    assert len(set(texts)) == 1 and "Received: barrier" in texts[0]
    if keras_dist.rank() == 0:
        with pytest.raises(errors.MismatchError):
            handle.wait()
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


def raised_by_mpi(call):
    with pytest.raises(errors.MismatchError) as caught:
        call()
    return MPI.COMM_WORLD.allgather(str(caught.value))


def test_join_takes_part_in_named_operations_in_any_order():
    size, rank = keras_dist.size(), keras_dist.rank()
    last = size - 1
    if rank == last and size > 1:
        assert keras_dist.join() in range(size)
    else:
        handles = {n: keras_dist.allreduce_async(value_of(n), "sum", n) for n in own_order()}
        joined = keras_dist.join()
        here = size - (size > 1)
        assert all((handles[n].wait() == here * value_of(n)).all() for n in NAMES)
        assert joined == (here - 1 if size > 1 else 0)
    assert keras_dist.allreduce(1.0, "sum") == size


# --- Two pending operations with one name


def assert_is_refused(call):
    """Asserts that a call is refused because its name is pending on some rank."""
    with pytest.raises(errors.ArgumentError, match=r"Expected one operation named 'a' at a time"):
        call()


def test_a_name_that_is_pending_is_refused():
    several()
    gate = threading.Event()
    comm = keras_dist.runtime.communicator()
    comm.order.queue(gate.wait, "wait")  # blocks the queue until all ranks have called
    first = keras_dist.allreduce_async(1.0, "sum", "a")
    assert_is_refused(lambda: keras_dist.allreduce_async(2.0, "sum", "a"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert_is_refused(pool.submit(keras_dist.allreduce, 2.0, "sum", "a").result)
    gate.set()
    assert first.wait() == keras_dist.size()
    assert keras_dist.allreduce(2.0, "sum", "a") == 2 * keras_dist.size()


@pytest.mark.parametrize("after", ["another name", "the same name", "no name"])
def test_a_refusal_is_raised_on_ranks_where_the_first_operation_has_completed(after):
    several()
    comm, size = keras_dist.runtime.communicator(), keras_dist.size()
    is_last = keras_dist.rank() == size - 1
    if is_last:  # on other ranks the first has completed before the second is queued
        gate = threading.Event()
        comm.order.queue(gate.wait, "wait")
        first = keras_dist.allreduce_async(1.0, "sum", "a")
        assert_is_refused(lambda: keras_dist.allreduce_async(2.0, "sum", "a"))
        gate.set()
        assert first.wait() == size
    else:
        assert keras_dist.allreduce_async(1.0, "sum", "a").wait() == size
        assert_is_refused(keras_dist.allreduce_async(2.0, "sum", "a").wait)
    name = {"another name": "b", "the same name": "a", "no name": None}[after]
    assert keras_dist.allreduce(3.0, "sum", name) == 3 * size
    assert keras_dist.allreduce(4.0, "sum", "a") == 4 * size


def test_a_name_queued_twice_on_one_rank_is_an_error_only_there():
    several()
    comm, size = keras_dist.runtime.communicator(), keras_dist.size()
    if keras_dist.rank() == 0:
        gate = threading.Event()
        comm.order.queue(gate.wait, "wait")
        first = keras_dist.allreduce_async(1.0, "sum", "a")
        assert_is_refused(lambda: keras_dist.allreduce_async(2.0, "sum", "a"))
        gate.set()
    else:
        first = keras_dist.allreduce_async(1.0, "sum", "a")
    assert first.wait() == size
    assert keras_dist.allreduce(3.0, "sum", "b") == 3 * size
    assert keras_dist.allreduce(4.0, "sum") == 4 * size
