"""Objects, the barrier, and bad arguments of one rank, after which the job continues.

Results are those of `test_conformance`, and errors those of `test_error_texts`.
"""

import copyreg
import time

import numpy as np
import pytest

import keras_dist
from keras_dist import errors

pytestmark = pytest.mark.jobs("openmpi-3", "tensorflow-1", "nodes-2+1")


def several():
    if keras_dist.size() == 1:
        pytest.skip("ranks cannot differ when there is one")


def odd_one(usual, odd):
    """Returns `odd` on the last rank and `usual` on the others."""
    return odd if keras_dist.rank() == keras_dist.size() - 1 else usual


def raised(kind, action):
    """Returns the messages of the error of `action` on all ranks."""
    with pytest.raises(kind) as caught:
        action()
    return keras_dist.allgather_object(str(caught.value))


def test_the_arguments_of_old_scripts():
    with pytest.warns(DeprecationWarning, match=r"removed in keras_dist 2\.0: pass op=hvd\.Sum"):
        assert keras_dist.allreduce(1, average=False) == keras_dist.size()
    with pytest.raises(errors.ArgumentError, match="a name is passed as name="):
        keras_dist.allreduce(1, "loss")


def test_objects():
    rank, size = keras_dist.rank(), keras_dist.size()
    assert keras_dist.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    for root in range(size):
        assert keras_dist.broadcast_object(("root", rank), root) == ("root", root)
    large = b"x" * (rank * 100_000)
    assert [len(part) for part in keras_dist.allgather_object(large)] == [
        r * 100_000 for r in range(size)
    ]
    given = np.arange(1, 5).astype(">i8")
    for found in (keras_dist.broadcast_object(given), keras_dist.allgather_object(given)[0]):
        assert found.dtype.isnative and found.tolist() == [1, 2, 3, 4]


@pytest.mark.jobs("nodes-2x2")
@pytest.mark.parametrize("count", [3, 50_000, 2_000_000])
def test_results_are_aligned_for_frameworks(count):
    for result in keras_dist.grouped_allreduce([np.ones(count, "float32"), np.ones(5)]):
        assert result.ctypes.data % 64 == 0


def test_barrier_waits_for_the_last():
    if keras_dist.rank() == keras_dist.size() - 1:
        time.sleep(0.3)
    came = time.monotonic()  # the same clock for all processes of a machine
    keras_dist.barrier()
    left = time.monotonic()
    assert left >= max(keras_dist.allgather_object(came))


def test_adasum_needs_a_power_of_two_ranks():
    if keras_dist.size() & (keras_dist.size() - 1):
        texts = raised(errors.ArgumentError, lambda: keras_dist.allreduce(1.0, "adasum"))
        assert "a power of two for Adasum. Received: 3 ranks. Start 2 or 4 ranks" in texts[0]
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


def test_splits_of_different_lengths_are_an_error_on_all():
    splits = [[1], [1, 2]]  # numpy's text differs between versions
    texts = raised(errors.ArgumentError, lambda: keras_dist.alltoall(np.zeros(4), splits))
    assert len(set(texts)) == 1 and "splits to be a list of integers. Received: " in texts[0]


class Unreadable:
    """A value that cannot be converted to an array, like a tensor on a GPU."""

    def __array__(self, *_, **__):
        raise TypeError("it is elsewhere")


@pytest.mark.parametrize(
    "call",
    [
        keras_dist.allgather_object,
        lambda odd: keras_dist.broadcast_object(odd, keras_dist.size() - 1),
        keras_dist.allreduce,
        keras_dist.allgather,
        lambda odd: keras_dist.broadcast(odd, 0),
        keras_dist.alltoall,
        keras_dist.reducescatter,
    ],
)
def test_a_value_that_cannot_be_read_on_one_rank_is_an_error_on_all(call):
    class Local(Unreadable):  # cannot be pickled either
        pass

    with pytest.raises((errors.ArgumentError, TypeError, AttributeError)) as caught:
        call(odd_one(np.ones((6, 1)), Local()))
    if keras_dist.size() > 1:
        text = str(caught.value)
        assert "read. Received: " in text or "can be pickled. Received: Local (" in text
    assert keras_dist.allreduce(float(keras_dist.rank()), "sum") == sum(range(keras_dist.size()))
    assert keras_dist.allgather_object(keras_dist.rank()) == list(range(keras_dist.size()))


def frozen(odd):
    array = np.zeros(3)
    array.flags.writeable = not odd
    return array


DIFFERENT = {
    "a dtype without that op": lambda odd: keras_dist.allreduce(
        np.ones(3, bool if odd else "f4"), "Sum"
    ),
    "no such compression": lambda odd: keras_dist.allreduce(
        1.0, compression="zip" if odd else None
    ),
    "rows of different lengths": lambda odd: keras_dist.allgather([[1], [1, 2]] if odd else [[1]]),
    "no such root": lambda odd: keras_dist.broadcast(1.0, 99 if odd else 0),
    "no such root of objects": lambda odd: keras_dist.broadcast_object(1, 99 if odd else 0),
    "an array that is read-only": lambda odd: keras_dist.broadcast_([frozen(odd)]),
    "a wrong op of rows": lambda odd: keras_dist.sparse_allreduce(
        np.ones((1, 2)), [0], "Sum" if not odd else "none"
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_bad_arguments_of_a_rank_are_an_error_on_every_rank(what):
    for _ in range(2):
        with pytest.raises(errors.KerasDistError) as caught:
            DIFFERENT[what](odd_one(False, True))
        kinds = keras_dist.allgather_object(type(caught.value).__name__)
        assert len(set(kinds)) == 1
        assert keras_dist.allreduce(1.0, "Sum") == keras_dist.size()


def test_errors_travel_whatever_reducers_other_packages_register(monkeypatch):
    def refuse(error):
        raise AssertionError(f"{error!r} was pickled with its cause")

    keras_dist.allreduce(1.0)  # imports packages, which may be Dask: it registers a reducer itself
    for kind in errors.KerasDistError.__subclasses__():
        monkeypatch.setitem(copyreg.dispatch_table, kind, refuse)
    for what in ("no such root", "rows of different lengths"):
        for odd in (True, keras_dist.rank() == 0):
            with pytest.raises(errors.KerasDistError):
                DIFFERENT[what](odd)
    assert keras_dist.allreduce(1.0, "Sum") == keras_dist.size()
