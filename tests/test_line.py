"""Who is next: turns come as they were asked for, whoever asks."""

import functools
import threading
import time
import weakref

import pytest

from keras_dist._engine.collectives.queue import CollectiveQueue
from keras_dist._engine.collectives.ticket import Reordered
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import Retry


@pytest.fixture
def line():
    made = CollectiveQueue(threading.RLock())
    yield made
    made.close()


def stand(line, done, label):
    """Starts a thread that takes its turn; returns once it stands in the line."""

    def take():
        with line, line:  # a collective within a collective
            done.append(label)

    before = len(line._line)
    thread = threading.Thread(target=take)
    thread.start()
    while len(line._line) == before:
        time.sleep(0.001)
    return thread


def test_turns_come_in_the_order_of_asking(line):
    done, threads = [], []
    with line:
        for number in range(0, 12, 2):
            threads.append(stand(line, done, number))
            line.queue(lambda number=number: done.append(number + 1), "append")
        assert done == []
    line.drain()
    assert done == list(range(12))
    for thread in threads:
        thread.join()


def test_what_the_ranks_agree_on_goes_to_the_front(line):
    done = []

    def take(name):
        if not done and name != "b":
            raise Reordered("b")
        done.append(name)

    with line:
        handles = [line.queue(functools.partial(take, name), "append", name) for name in "abc"]
        assert line.standing() == (("a", "b", "c"), True)
    line.run(functools.partial(take, "d"), "d")
    for handle in handles:
        handle.wait()
    assert done == ["b", "a", "c", "d"]
    assert line.standing() == ((), False)


def test_no_more_will_come_once_every_thread_of_the_script_waits(line):
    gate = threading.Event()
    threads = [threading.Thread(target=gate.wait, name="keras_dist", daemon=True)]
    threads[0].start()
    with line:
        handle = line.queue(lambda: None, "nothing", "a")
        assert line.standing() == (("a",), True)
        threads.append(threading.Thread(target=gate.wait, daemon=True))
        threads[-1].start()
        assert line.standing() == (("a",), False)
        gate.set()
        for thread in threads:
            thread.join()
        threads.append(threading.Thread(target=handle.wait))
        threads[-1].start()
        while not handle.waiters:
            time.sleep(0.001)
        assert line.standing() == (("a",), True)
    threads[-1].join()


def test_a_place_that_has_left_is_not_waited_for(line):
    told = [Reordered("gone"), Reordered("gone")]

    def work():
        if len(told) > before:
            raise told.pop()
        return "ran"

    before = 1
    handle = line.queue(work, "nothing", "a")
    assert handle._ended.wait(10)
    assert handle.wait() == "ran"
    before = 0
    assert line.run(work, "b") == "ran"


def test_that_another_comes_first_is_no_sign_of_a_loss():
    def work():
        raise Reordered("b")

    with pytest.raises(Reordered):
        Retry(Communicator()).run(work)  # without MPI nobody can be asked who has died


def test_who_is_interrupted_holds_up_nobody(line, monkeypatch):
    wait_for, main, gate = line._moved.wait_for, threading.current_thread(), threading.Event()

    def interrupted(predicate):
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        return wait_for(predicate)

    with monkeypatch.context() as patch:
        patch.setattr(line._moved, "wait_for", interrupted)
        line.queue(gate.wait, "wait")
        with pytest.raises(KeyboardInterrupt), line:
            pass
    behind = line.queue(lambda: "ran", "nothing")
    gate.set()
    assert behind.wait() == "ran"


def test_the_lock_may_be_held_when_the_line_takes_its_place():
    lock, done = threading.RLock(), []
    with lock:
        line = CollectiveQueue(lock)
        line.queue(lambda: done.append("queued"), "append")
        with line:  # a part of the collective that held the lock
            done.append("part")
    line.close()
    assert done == ["part", "queued"]


def test_results_and_values_are_let_go(line):
    class Value:
        pass

    value = Value()
    there = weakref.ref(value)
    handle = line.queue(functools.partial(lambda given: 1 / 0, value), "division")
    del value
    with pytest.raises(ZeroDivisionError):
        handle.wait()
    gone = weakref.ref(handle)
    del handle
    line.drain()
    for _ in range(1000):  # the thread may still be letting go of it
        if there() or gone():
            time.sleep(0.005)
    assert (there(), gone()) == (None, None)


def test_a_line_that_is_closed_takes_nothing():
    line = CollectiveQueue(threading.RLock())
    line.close()
    with pytest.raises(RuntimeError, match="allreduce was queued for ranks that have been left"):
        line.queue(lambda: None, "allreduce")
