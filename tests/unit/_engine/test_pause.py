"""How a rank lets others run while it polls MPI; a simulated clock stands in for the machine."""

import types

import pytest

from keras_dist._engine.mpi import transfer
from keras_dist._engine.shm import wait


class Machine:
    """A machine whose clock advances only when it works.

    Args:
        poll: seconds that a poll of MPI takes.
        switch: seconds until a thread that yields its core has it again.
    """

    def __init__(self, poll, switch):
        self.now, self.poll, self.switch = 0.0, poll, switch
        self.done = []  # what the waiting thread has done

    def perf_counter(self):
        return self.now

    def sched_yield(self):
        self.done.append("yield")
        self.now += self.switch

    def sleep(self, seconds):
        self.done.append("nap")
        self.now += seconds

    def wait(self, polls):
        """Waits for a request that is complete at the last of some polls; returns what was done."""
        left = polls

        def test():
            nonlocal left
            left -= 1
            self.now += self.poll
            return left == 0

        self.done.clear()
        transfer.wait(types.SimpleNamespace(Test=test))
        return self.done


@pytest.fixture
def machine(monkeypatch):
    def make(poll=1e-6, switch=1e-6):
        made = Machine(poll, switch)
        monkeypatch.setattr(wait, "time", made)
        monkeypatch.setattr(wait, "os", made)
        monkeypatch.setattr(transfer, "time", made)
        monkeypatch.setattr(wait, "_crowded_until", 0.0)
        return made

    return make


def test_a_thread_polls_while_it_has_the_core(machine):
    assert set(machine().wait(1000)) == {"yield"}


def test_a_thread_naps_where_others_take_the_core(machine):
    crowded = machine(switch=1e-4)
    done = crowded.wait(1000)
    assert done[: wait.IDLE_POLLS] == ["yield"] * wait.IDLE_POLLS
    assert done.count("nap") > 900
    # It tries the core again from time to time, and then takes it.
    crowded.switch = 1e-6
    assert crowded.wait(1000)[-800:] == ["yield"] * 800


def test_a_thread_that_moves_data_does_not_nap(machine):
    assert set(machine(poll=5e-5, switch=1e-4).wait(1000)) == {"yield"}


def test_the_thread_of_a_queued_operation_does_not_nap_while_it_is_awaited(machine, monkeypatch):
    monkeypatch.setattr(wait._pace, "is_awaited", lambda: True)
    assert set(machine(switch=1e-4).wait(1000)) == {"yield"}
