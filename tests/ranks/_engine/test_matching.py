"""Named operations, which match in any order."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from test_collectives import odd_one, raised, several

import keras_dist
from keras_dist import _engine, errors, runtime

pytestmark = pytest.mark.jobs("engine")

NAMES = [f"weight {number}" for number in range(12)]


def own_order():
    """Returns the names, in a different order on each rank."""
    return list(np.random.default_rng(keras_dist.rank()).permutation(NAMES))


def value_of(name):
    return np.arange(3.0) + NAMES.index(name)


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
    for name in (first, second):
        assert (results[name] == keras_dist.size() * value_of(name)).all()


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


def test_a_process_set_has_a_queue_and_names_of_its_own():
    several()
    size, handles = keras_dist.size(), []
    some = keras_dist.add_process_set(range((size + 1) // 2))
    of_all = keras_dist.allreduce_async(float(keras_dist.rank()), "sum")
    if some.included():
        named = {
            name: keras_dist.allreduce_async(value_of(name), name=name, process_set=some)
            for name in own_order()
        }
        assert all((named[name].wait() == value_of(name)).all() for name in NAMES)
        values = [np.ones(10_000 * (1 + number % 3)) for number in range(20)]
        handles = [keras_dist.allreduce_async(each, "sum", process_set=some) for each in values]
    assert keras_dist.remove_process_set(some)  # after the queued operations
    assert all(handle.wait()[0] == len(some.ranks) for handle in handles)
    assert of_all.wait() == sum(range(size))


# --- Calls that differ

SUM = _engine.OpOptions(_engine.ReduceOp.SUM)


def test_plans_with_different_buckets_are_found():
    several()
    comm = runtime.communicator()
    arrays = [np.full(50_000, number, np.float32) for number in range(4)]
    specs = [(array.shape, array.dtype) for array in arrays]
    for usual, odd in ((1, 2**30), (2**30, 1), (500_000, 300_000)):
        plan = _engine.BucketOptions(odd_one(usual, odd))
        fused = _engine.FusedAllreduce(comm, list("abcd"), specs, SUM, plan)
        with pytest.raises(errors.MismatchError, match="buckets of gradients"):
            fused(arrays)
    assert keras_dist.allreduce(1.0, "Sum") == keras_dist.size()


def test_gradients_that_differ_are_named_also_where_their_buckets_differ():
    import keras

    several()
    rows = 4_000_000 if keras_dist.rank() == 0 else 10  # of more than a bucket, and of less
    kernel = keras.Variable(np.zeros((rows, 2), np.float32), name="kernel")
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    gradient = keras.ops.ones((rows, 2))
    with pytest.raises(errors.MismatchError, match="'the gradient of kernel' with shape"):
        optimizer._keras_dist([gradient], [kernel])
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


WAITS = {
    "barrier": keras_dist.barrier,
    "broadcast_object": lambda: keras_dist.broadcast_object("here"),
    "allgather_object": lambda: keras_dist.allgather_object("here"),
    "allreduce": lambda: keras_dist.allreduce(1.0),
    "allreduce_async": lambda: keras_dist.allreduce_async(1.0).wait(),
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
    with pytest.raises(errors.MismatchError) as caught:
        keras_dist.barrier()
    texts = MPI.COMM_WORLD.allgather(str(caught.value))
    assert len(set(texts)) == 1 and "Received: barrier" in texts[0]
    if keras_dist.rank() == 0:
        with pytest.raises(errors.MismatchError):
            handle.wait()
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


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


def closed_gate():
    """Returns an event for which the queue waits."""
    gate = threading.Event()
    runtime.communicator().order.queue(gate.wait, "wait")
    return gate


def assert_is_refused(call):
    """Asserts that a call is refused because its name is pending on some rank."""
    with pytest.raises(errors.ArgumentError, match=r"Expected one operation named 'a' at a time"):
        call()


def test_a_name_that_is_pending_is_refused():
    several()
    gate = closed_gate()  # until all ranks have called
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
    size = keras_dist.size()
    is_last = keras_dist.rank() == size - 1
    if is_last:  # on other ranks the first has completed before the second is queued
        gate = closed_gate()
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
    size = keras_dist.size()
    if keras_dist.rank() == 0:
        gate = closed_gate()
        first = keras_dist.allreduce_async(1.0, "sum", "a")
        assert_is_refused(lambda: keras_dist.allreduce_async(2.0, "sum", "a"))
        gate.set()
    else:
        first = keras_dist.allreduce_async(1.0, "sum", "a")
    assert first.wait() == size
    assert keras_dist.allreduce(3.0, "sum", "b") == 3 * size
    assert keras_dist.allreduce(4.0, "sum") == 4 * size
