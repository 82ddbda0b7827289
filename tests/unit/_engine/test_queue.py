"""The queue of collectives: operations run in the order of their calls."""

import _thread
import functools
import threading
import time
import types
import weakref

import pytest

from keras_dist import errors
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.ordering.queue import CollectiveQueue
from keras_dist._engine.ordering.ticket import Reordered
from keras_dist._engine.recovery import Retry
from keras_dist._engine.shm import wait


@pytest.fixture
def queue():
    made = CollectiveQueue(threading.RLock(), str)
    yield made
    made.close()


def stand(queue, done, label):
    """Starts a thread that queues an operation; returns once it is queued."""

    def take():
        with queue, queue:  # a collective within a collective
            done.append(label)

    before = len(queue._tickets)
    thread = threading.Thread(target=take)
    thread.start()
    while len(queue._tickets) == before:
        time.sleep(0.001)
    return thread


def test_operations_run_in_the_order_of_their_calls(queue):
    done, threads = [], []
    with queue:
        for number in range(0, 12, 2):
            threads.append(stand(queue, done, number))
            queue.queue(lambda number=number: done.append(number + 1), "append")
        assert done == []
    queue.drain()
    assert done == list(range(12))
    for thread in threads:
        thread.join()


def test_an_operation_naps_until_somebody_waits_for_it(queue, monkeypatch):
    paces, napped = [], threading.Event()
    clock = types.SimpleNamespace(sleep=lambda _: paces.append("nap"), perf_counter=time.monotonic)
    monkeypatch.setattr(wait, "time", clock)
    monkeypatch.setattr(
        wait, "os", types.SimpleNamespace(sched_yield=lambda: paces.append("yield"))
    )

    def work():
        wait.pause()
        napped.set()
        while paces[-1] == "nap":
            wait.pause()

    handle = queue.queue(work, "work")
    assert napped.wait(60)
    handle.wait()
    assert paces[0] == "nap" and paces[-1] == "yield"
    wait.pause()  # a thread that waits for itself
    assert paces[-1] == "yield"


def test_the_operation_that_ranks_agree_on_moves_to_the_front(queue):
    done = []

    def take(name):
        if not done and name != "b":
            raise Reordered("b")
        done.append(name)

    with queue:
        handles = [queue.queue(functools.partial(take, name), "append", name) for name in "abc"]
        held = queue.held_names()
        assert held.names == ("a", "b", "c", None)  # the ticket of this call has no name
        assert held.is_complete and held.is_awaited and not held.gives_way
    queue.run(functools.partial(take, "d"), "d")
    for handle in handles:
        handle.wait()
    assert done == ["b", "a", "c", "d"]


def test_the_first_without_a_name_moves_before_names_and_waits_for_no_drain(queue):
    done = []

    def named():
        if not done:
            raise Reordered(None)
        done.append("a")

    with queue:
        handle = queue.queue(named, "append", "a")
        waiting = threading.Thread(target=queue.finish)  # follows all that is in the queue
        waiting.start()
        while len(queue._tickets) < 3:
            time.sleep(0.001)
        last = queue.queue(lambda: done.append("b"), "append")
    for wait_for in (last.wait, handle.wait, waiting.join):
        wait_for()
    assert done == ["b", "a"]


@pytest.mark.parametrize("of_all", [True, False])
def test_an_error_ends_the_waits_of_the_script(queue, of_all):
    def fail():
        queue.end_waits(error, of_all)
        raise error

    error, ended = errors.MismatchError("differs"), []

    def block():
        try:
            with queue:
                pass
        except errors.MismatchError as caught:
            ended.append(caught)

    with queue:
        failing = queue.queue(fail, "fail")
        later = queue.queue(lambda: "ran", "run", "a")
        waiting = threading.Thread(target=block)
        waiting.start()
        while len(queue._tickets) < 4:
            time.sleep(0.001)
    waiting.join()
    assert ended == [error]
    with pytest.raises(errors.MismatchError):
        failing.wait()
    if of_all:
        with pytest.raises(errors.MismatchError):
            later.wait()
    else:
        assert later.wait() == "ran"


def test_an_error_that_no_wait_has_seen_is_raised_at_the_next(queue):
    error = errors.MismatchError("differs")

    def fail():
        queue.end_waits(error, False)
        raise error

    handle = queue.queue(fail, "fail")
    assert handle._ended.wait(60)
    with pytest.raises(errors.MismatchError), queue:
        pass
    with queue:  # once
        pass


def test_held_names_are_complete_when_every_thread_of_the_script_waits(queue):
    gate = threading.Event()
    threads = [threading.Thread(target=gate.wait, name="keras_dist", daemon=True)]
    threads[0].start()
    with queue:
        handle = queue.queue(lambda: None, "nothing", "a")
        assert queue.held_names().is_complete
        threads.append(threading.Thread(target=gate.wait, daemon=True))
        threads[-1].start()
        assert not queue.held_names().is_complete
        gate.set()
        for thread in threads:
            thread.join()
        threads.append(threading.Thread(target=handle.wait))
        threads[-1].start()
        while not handle.waiters:
            time.sleep(0.001)
        assert queue.held_names().is_complete
    threads[-1].join()


def test_a_thread_of_a_framework_stands_for_one_thread_of_the_script(queue):
    found, ended, gate = [], threading.Event(), threading.Event()
    idle = threading.Thread(target=gate.wait, daemon=True)

    def call():
        with queue:
            found.append(queue.held_names().is_complete)
            idle.start()  # it may call an operation later
            found.append(queue.held_names().is_complete)
        ended.set()

    _thread.start_new_thread(call, ())
    assert ended.wait(60)
    gate.set()
    idle.join()
    assert found == [True, False]


def test_a_ticket_that_was_removed_is_not_waited_for(queue):
    told = [Reordered("gone"), Reordered("gone")]

    def work():
        if len(told) > before:
            raise told.pop()
        return "ran"

    before = 1
    handle = queue.queue(work, "nothing", "a")
    assert handle._ended.wait(60)
    assert handle.wait() == "ran"
    before = 0
    assert queue.run(work, "b") == "ran"


def test_a_reordered_operation_is_not_a_lost_rank():
    def work():
        raise Reordered("b")

    with pytest.raises(Reordered):
        Retry(Communicator()).run(work)  # without MPI dead ranks cannot be detected


def test_an_interrupted_call_does_not_block_the_queue(queue, monkeypatch):
    wait_for, main, gate = queue._changed.wait_for, threading.current_thread(), threading.Event()

    def interrupted(predicate):
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        return wait_for(predicate)

    with monkeypatch.context() as patch:
        patch.setattr(queue._changed, "wait_for", interrupted)
        queue.queue(gate.wait, "wait")
        with pytest.raises(KeyboardInterrupt), queue:
            pass
    behind = queue.queue(lambda: "ran", "nothing")
    gate.set()
    assert behind.wait() == "ran"


def test_the_lock_may_be_held_when_the_queue_replaces_it():
    lock, done = threading.RLock(), []
    with lock:
        queue = CollectiveQueue(lock, str)
        queue.queue(lambda: done.append("queued"), "append")
        with queue:  # a part of the collective that held the lock
            done.append("part")
    queue.close()
    assert done == ["part", "queued"]


def test_results_and_values_are_released(queue):
    class Value:
        pass

    value = Value()
    there = weakref.ref(value)
    handle = queue.queue(functools.partial(lambda given: 1 / 0, value), "division")
    del value
    with pytest.raises(ZeroDivisionError):
        handle.wait()
    gone = weakref.ref(handle)
    del handle
    queue.drain()
    for _ in range(1000):  # the thread may still hold a reference
        if there() or gone():
            time.sleep(0.005)
    assert (there(), gone()) == (None, None)


def test_a_closed_queue_refuses_operations():
    queue = CollectiveQueue(threading.RLock(), str)
    queue.close()
    with pytest.raises(RuntimeError, match="allreduce was queued after this rank had left the job"):
        queue.queue(lambda: None, "allreduce")
