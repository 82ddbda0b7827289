"""Programs of collectives on real ranks: results of numpy, and one order or one error on all.

`conformance` draws the first kind. Of the second, ranks issue operations without a name in one
order and named ones in any; in some programs a rank makes another call than the others.
"""

import contextlib
import random

import conformance
import numpy as np
import pytest
from mpi4py import MPI

import keras_dist
from keras_dist import errors

pytestmark = pytest.mark.jobs("engine", "torch-4", "nodes-2x2")


@pytest.mark.jobs("tensorflow-1", "nodes-2+1", "nodes-4x1")
@pytest.mark.parametrize("number", range(conformance.COUNT or 24))
def test_results_are_those_of_numpy(monkeypatch, number):
    program = conformance.draw(number, keras_dist.size())
    conformance.prepare(monkeypatch, program.is_low, program.bucket_nbytes)
    wrong = MPI.COMM_WORLD.allgather(conformance.execute(program, MPI))
    assert wrong == [[]] * keras_dist.size()


# --- One order, or one error on all ranks

NAMES = ["a", "b", "c"]


def value_of(name):
    return np.arange(3.0) + NAMES.index(name)


def guarded(wrong):
    with keras_dist.raise_on_all():
        if wrong:
            raise ValueError("an exception of the script")


def wait(handle):
    return handle.wait()


# Operations without a name; `wrong` on a rank that makes another call. All return what tells
# whether the result is right.
MEETINGS = {
    "barrier": lambda wrong: keras_dist.allgather([1]) if wrong else keras_dist.barrier(),
    "broadcast_object": lambda wrong: (
        keras_dist.broadcast_object("here", 99 if wrong else 0) == "here"
    ),
    "allgather_object": lambda wrong: (
        keras_dist.barrier() if wrong else len(keras_dist.allgather_object(1)) == keras_dist.size()
    ),
    "shape": lambda wrong: (
        keras_dist.allreduce(np.ones(3 + wrong), "sum") == keras_dist.size()
    ).all(),
    "dtype": lambda wrong: (
        keras_dist.allreduce(np.ones(3, "f4" if wrong else "f8"), "sum") == keras_dist.size()
    ).all(),
    "large": lambda wrong: (
        keras_dist.allreduce(np.ones(70_000 + wrong), "sum") == keras_dist.size()
    ).all(),
    "op": lambda wrong: keras_dist.allreduce(1.0, "median" if wrong else "average") == 1,
    "name": lambda wrong: keras_dist.allreduce(1.0, name="nobody's" if wrong else None) == 1,
    "queued": lambda wrong: (
        wait(keras_dist.allreduce_async([1.0] * (1 + wrong), "sum"))[0] == keras_dist.size()
    ),
    "an exception in a loop": guarded,
}


class Program:
    """The steps of this rank.

    Args:
        number: of the program.
        fails: whether a rank makes another call.
        waits_early: whether a rank may wait for a name that another has not queued yet.
    """

    def __init__(self, number, fails, waits_early):
        size, rank = keras_dist.size(), keras_dist.rank()
        one = random.Random(f"{conformance.SEED} {size} {number}")
        mine = random.Random(f"{conformance.SEED} {size} {number} {rank}")
        meetings = [one.choice([*MEETINGS]) for _ in range(5)]
        odd, fault = one.randrange(size), one.randrange(len(meetings) + 1)
        is_odd = fails and size > 1 and rank == odd
        self.wrong_name = NAMES[0] if is_odd and fault == len(meetings) else None
        self.steps = [("meet", name, is_odd and fault == n) for n, name in enumerate(meetings)]
        for name in NAMES:
            queued = mine.randrange(len(self.steps) + 1)
            self.steps.insert(queued, ("queue", name, False))
            if waits_early:
                waits = mine.randrange(queued + 1, len(self.steps) + 1)
                self.steps.insert(waits, ("wait", name, False))
        if not waits_early:
            self.steps += [("wait", name, False) for name in mine.sample(NAMES, len(NAMES))]
        self.handles = {}

    def run(self):
        """Runs the steps; returns `None` if all results are right, otherwise the first error."""
        try:
            for what, name, wrong in self.steps:
                if what == "meet":
                    assert MEETINGS[name](wrong) in (None, True), name
                elif what == "queue":
                    self.queue(name)
                else:
                    self.check(name)
        except Exception as error:
            return error
        return None

    def queue(self, name):
        more = 1 if name == self.wrong_name else 0
        value = np.append(value_of(name), [0.0] * more)
        self.handles[name] = keras_dist.allreduce_async(value, "sum", name)

    def check(self, name):
        assert (self.handles[name].wait() == keras_dist.size() * value_of(name)).all()

    def settle(self):
        """Ends what has begun: a name that others lack ends when all ranks wait."""
        for handle in self.handles.values():
            with contextlib.suppress(errors.KerasDistError):
                handle.wait()
        for _ in range(1 + len(NAMES) * keras_dist.size()):
            with contextlib.suppress(errors.KerasDistError):
                keras_dist.barrier()
                return


KINDS = ["equal calls", "waits for what others lack", "one rank differs"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(conformance.COUNT or 20))
def test_any_interleaving_completes_or_is_an_error_on_all_ranks(number, kind):
    fails = kind == "one rank differs"
    program = Program(number, fails, waits_early=kind != "equal calls")
    error = program.run()
    assert not isinstance(error, AssertionError), error
    program.settle()
    told = MPI.COMM_WORLD.allgather(None if error is None else f"{type(error).__name__}: {error}")
    assert len({text is None for text in told}) == 1, told
    if not fails:
        assert len(set(told)) == 1, told
    if fails and keras_dist.size() > 1:
        assert None not in told
    if kind == "equal calls":
        assert set(told) == {None}, told
    for count in (1, 70_000):
        assert (keras_dist.allreduce(np.ones(count), "sum") == keras_dist.size()).all()
