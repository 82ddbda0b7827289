"""An error on one rank is raised on all, and the next operation succeeds."""

import copyreg

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist import _engine, errors, runtime

pytestmark = pytest.mark.jobs("engine", "torch-3")

SUM = _engine.OpOptions(_engine.ReduceOp.SUM)
DIFFERENT = {
    "a dtype without that op": lambda odd: keras_dist.allreduce(
        np.ones(3, bool if odd else "f4"), "Sum"
    ),
    "no such op": lambda odd: keras_dist.allreduce(1.0, "largest" if odd else "Sum"),
    "a factor that is none": lambda odd: keras_dist.allreduce(
        1.0, prescale_factor="2" if odd else 2.0
    ),
    "no such compression": lambda odd: keras_dist.allreduce(
        1.0, compression="zip" if odd else None
    ),
    "rows of different lengths": lambda odd: keras_dist.allgather([[1], [1, 2]] if odd else [[1]]),
    "a scalar to gather": lambda odd: keras_dist.allgather(1.0 if odd else [1.0]),
    "no such root": lambda odd: keras_dist.broadcast(1.0, 99 if odd else 0),
    "no such root of objects": lambda odd: keras_dist.broadcast_object(1, 99 if odd else 0),
    "an array that is read-only": lambda odd: keras_dist.broadcast_([frozen(odd)]),
    "a wrong op to scatter": lambda odd: keras_dist.reducescatter(np.ones(8), 3 if odd else "Sum"),
    "a wrong op of rows": lambda odd: keras_dist.sparse_allreduce(
        np.ones((1, 2)), [0], "Sum" if not odd else "none"
    ),
}


def frozen(odd):
    array = np.zeros(3)
    array.flags.writeable = not odd
    return array


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("who", ["the last rank", "every rank"])
def test_bad_arguments_of_a_rank_are_an_error_on_every_rank(what, who):
    odd = who == "every rank" or keras_dist.rank() == keras_dist.size() - 1
    for _ in range(2):
        with pytest.raises(errors.KerasDistError) as caught:
            DIFFERENT[what](odd)
        kinds = keras_dist.allgather_object(type(caught.value).__name__)
        assert len(set(kinds)) == 1
        assert keras_dist.allreduce(1.0, "Sum") == keras_dist.size()


def refuse(error):
    raise AssertionError(f"{error!r} was pickled with its cause")


def test_errors_travel_whatever_reducers_other_packages_register(monkeypatch):
    keras_dist.allreduce(1.0)  # imports packages, which may be Dask: it registers a reducer itself
    for kind in errors.KerasDistError.__subclasses__():
        monkeypatch.setitem(copyreg.dispatch_table, kind, refuse)
    for what in ("no such root", "rows of different lengths"):
        for odd in (True, keras_dist.rank() == 0):
            with pytest.raises(errors.KerasDistError):
                DIFFERENT[what](odd)
    assert keras_dist.allreduce(1.0, "Sum") == keras_dist.size()


def test_plans_with_different_buckets_are_found():
    if keras_dist.size() == 1:
        pytest.skip("one rank cannot differ")
    comm = runtime.communicator()
    odd = keras_dist.rank() == keras_dist.size() - 1
    arrays = [np.full(50_000, number, np.float32) for number in range(4)]
    specs = [(array.shape, array.dtype) for array in arrays]
    names = ["a", "b", "c", "d"]
    for mine, others in ((2**30, 1), (1, 2**30), (300_000, 500_000)):
        size = mine if odd else others
        fused = _engine.FusedAllreduce(comm, names, specs, SUM, _engine.BucketOptions(size))
        with pytest.raises(errors.MismatchError, match="buckets of gradients"):
            fused(arrays)
    assert keras_dist.allreduce(1.0, "Sum") == keras_dist.size()


def test_gradients_that_differ_are_named_also_where_their_buckets_differ():
    if keras_dist.size() == 1:
        pytest.skip("one rank differs from none")
    rows = 4_000_000 if keras_dist.rank() == 0 else 10  # of more than a bucket, and of less
    kernel = keras.Variable(np.zeros((rows, 2), np.float32), name="kernel")
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    gradient = keras.ops.ones((rows, 2))
    with pytest.raises(errors.MismatchError, match="'the gradient of kernel' with shape"):
        optimizer._keras_dist([gradient], [kernel])
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


def test_queued_operations_run_before_their_set_is_removed():
    if keras_dist.size() < 2:
        pytest.skip("wants 2 ranks")
    some = keras_dist.add_process_set([0]) if keras_dist.size() == 2 else None
    some = some or keras_dist.add_process_set([0, 1])
    handles = []
    if some.included():
        values = [np.ones(10_000 * (1 + number % 3)) for number in range(20)]
        handles = [keras_dist.allreduce_async(v, "Sum", process_set=some) for v in values]
    members = len(some.ranks)
    keras_dist.remove_process_set(some)
    for handle in handles:
        assert keras_dist.synchronize(handle)[0] == members
