"""Calls like earlier ones: their short path, their memory and their results."""

import os

import ml_dtypes
import numpy as np
import pytest

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist._engine.shm import region

pytestmark = pytest.mark.jobs("engine")

LARGE = 70_000  # float32: results of this size are read in shared memory
SHAPES = [(), (1,), (0, 3), (5, 7), (200, 200), (LARGE,)]
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.complex64]


def several():
    if keras_dist.size() == 1:
        pytest.skip("one rank meets nobody")


def last_rank():
    return keras_dist.rank() == keras_dist.size() - 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_repeated_calls_give_the_bits_of_the_first(shape, dtype):
    mine = (np.arange(np.prod(shape, dtype=int)) % 5 + keras_dist.rank()).astype(dtype)
    mine = mine.reshape(shape)
    for op in (None, "sum", keras_dist.Product):
        first = keras_dist.allreduce(mine, op)
        for _ in range(4):
            again = keras_dist.allreduce(mine, op)
            assert (again.shape, again.dtype) == (shape, np.dtype(dtype))
            assert again.tobytes() == first.tobytes()
        transposed = keras_dist.allreduce(mine.T, op)
        assert transposed.tobytes() == np.ascontiguousarray(first.T).tobytes()


@pytest.mark.parametrize("shapes", [[(3,)], [(), (5, 7), (0, 3)], [(LARGE,), (3,), (2, LARGE)]])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64])
def test_repeated_lists_give_the_bits_of_the_first(shapes, dtype):
    mine = [
        (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + keras_dist.rank()).astype(dtype)
        for shape in shapes
    ]
    for op in ("average", "max"):
        first = keras_dist.grouped_allreduce(mine, op)
        single = [keras_dist.allreduce(array, op) for array in mine]
        transposed = [np.array(array, order="F") for array in mine]
        for given in (mine, tuple(mine), transposed, dict(enumerate(mine)).values(), mine):
            again = keras_dist.grouped_allreduce(given, op)
            assert isinstance(again, list) and [array.shape for array in again] == shapes
            assert {array.dtype for array in again} == {np.dtype(dtype)}
            for one, other, alone in zip(again, first, single, strict=True):
                assert one.tobytes() == other.tobytes() == alone.tobytes()


def test_a_repeated_list_that_differs_is_an_error_on_every_rank():
    several()
    mine, other = [np.ones(LARGE), np.ones(3)], [np.ones(LARGE), np.ones(4)]
    for given in (mine, other, mine, other):
        keras_dist.grouped_allreduce(given, "sum")
    for _ in range(2):
        with pytest.raises(errors.MismatchError, match=r"shape \(\d+,\)"):
            keras_dist.grouped_allreduce(other if last_rank() else mine, "sum")
        for given in (mine, other):
            for array in keras_dist.grouped_allreduce(given, "sum"):
                assert (array == keras_dist.size()).all()


def test_infinities_and_overflow_are_silent(recwarn):
    mine = np.array([np.inf if keras_dist.rank() else -np.inf, 3e38], np.float32)
    for _ in range(3):
        keras_dist.allreduce(mine, "sum")
    assert not recwarn.list


@pytest.mark.parametrize("keeps", [True, False], ids=["every rank", "the last rank"])
@pytest.mark.parametrize("count", [3, LARGE, LARGE + 20_000])
def test_results_that_are_kept_do_not_change(count, keeps):
    size, rank, kept = keras_dist.size(), keras_dist.rank(), {}
    for number in range(9):
        result = keras_dist.allreduce(np.full(count, rank + number, np.float32), "sum")
        assert (result == size * (size - 1) / 2 + size * number).all()
        if (keeps or last_rank()) and number % 4 != 3:
            kept[number] = result[count // 2 :]
        del result
    for number, part in kept.items():
        assert (part == size * (size - 1) / 2 + size * number).all()


@pytest.mark.parametrize("count", [3, LARGE + 1])
def test_a_write_to_a_result_is_private(count):
    mine = np.ones(count, np.float32)
    for number in range(9):
        result = keras_dist.allreduce(mine, "sum")
        assert (result == keras_dist.size()).all()
        if last_rank() and number % 3 == 1:
            result[-1] = -1
        keras_dist.barrier()
        assert (result[:-1] == keras_dist.size()).all()
        assert (result[-1] == keras_dist.size()) != (last_rank() and number % 3 == 1)


def test_a_forked_child_keeps_the_result_that_its_parent_drops():
    several()
    mine = np.ones(LARGE + 2, np.float32)
    result, size = keras_dist.allreduce(mine, "sum"), keras_dist.size()
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(ready[0], 1)
            os.write(done[1], b"y" if (result == size).all() else b"n")
        finally:  # the child is no rank and runs no tests
            os._exit(0)
    del result
    for number in range(6):
        keras_dist.allreduce(mine + number, "sum")
    os.write(ready[1], b".")
    answer = os.read(done[0], 1)
    os.waitpid(pid, 0)
    for end in (*ready, *done):
        os.close(end)
    assert keras_dist.allgather_object(answer) == [b"y"] * keras_dist.size()


@pytest.mark.parametrize("count", [3, LARGE])
def test_out_receives_the_result(count):
    mine, size = np.full(count, keras_dist.rank(), np.float32), keras_dist.size()
    total = size * (size - 1) / 2
    for _ in range(4):
        out = np.empty_like(mine)
        # Ranks may differ in where the result goes.
        given = None if last_rank() else out
        result = keras_dist.allreduce(mine, "sum", out=given)
        assert (result == total).all() and (given is None or result is given)
    for number in range(4):
        assert keras_dist.allreduce(mine, "sum", out=mine) is mine
        assert (mine == total * size**number).all()
    strided = np.zeros((count, 2), np.float32)[:, 0]
    keras_dist.allreduce(np.ones(count, np.float32), "sum", out=strided)
    assert (strided == size).all()


@pytest.mark.parametrize("count", [3, LARGE])
def test_an_out_that_does_not_fit_is_an_error_on_every_rank(count):
    mine = np.ones(count, np.float32)
    read_only = mine.copy()
    read_only.flags.writeable = False
    wrong = [np.ones(count + 1, np.float32), np.ones(count), read_only, [0.0] * count]
    keras_dist.allreduce(mine, "sum")
    for out in wrong:
        with pytest.raises(errors.KerasDistError, match="out to"):
            keras_dist.allreduce(mine, "sum", out=out if last_rank() else None)
        assert (keras_dist.allreduce(mine, "sum") == keras_dist.size()).all()


@pytest.mark.parametrize("count", [3, LARGE])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_repeated_call_that_differs_is_an_error_on_every_rank(count, is_new):
    several()
    mine, other = np.ones(count, np.float32), np.ones(count + 5 + is_new, np.float32)
    for array in [mine] if is_new else [mine, other]:
        for _ in range(2):
            keras_dist.allreduce(array, "sum")
    with pytest.raises(errors.MismatchError, match=r"shape \(\d+,\)"):
        keras_dist.allreduce(other if last_rank() else mine, "sum")
    with pytest.raises(errors.MismatchError, match="op="):
        keras_dist.allreduce(mine, "max" if last_rank() else "sum")
    for array in (mine, other):
        assert (keras_dist.allreduce(array, "sum") == keras_dist.size()).all()


def test_shapes_share_memory_and_their_number_is_bounded(monkeypatch):
    several()
    module = __import__("importlib").import_module("keras_dist._engine.collectives.allreduce")
    monkeypatch.setattr(module, "MAX_PLANS", 5)
    comm = runtime.communicator()
    if comm.node is None:
        pytest.skip("the ranks share no memory")
    for count in range(LARGE, LARGE + 12):
        keras_dist.allreduce(np.ones(count, np.float32), "sum")
    regions = {id(plan.memory.ready_reduction(0).region) for plan in comm.plans.values()}
    assert len(comm.plans) <= 5 and len(comm.calls) <= 5 and len(regions) == 1


def test_regions_stay_within_their_limit(monkeypatch):
    several()
    comm = runtime.communicator(keras_dist.global_process_set)
    if comm.node is None:
        pytest.skip("the ranks share no memory")
    monkeypatch.setattr(region, "MAX_POOL_NBYTES", 2**23)
    for _ in range(2):
        for count in (LARGE, 10 * LARGE, 2 * LARGE, 30 * LARGE, 3, 4 * LARGE):
            result = keras_dist.allreduce(np.ones(count, np.float32), "sum")
            assert (result == keras_dist.size()).all()
    sizes = keras_dist.allgather_object(comm.regions.nbytes)
    # One region may be larger than the limit.
    assert len(set(sizes)) == 1 and sizes[0] <= 2**23 + 5 * 2 * 30 * LARGE * 4


def test_an_engine_of_its_own_counts_lent_results_apart():
    several()
    comm = runtime.communicator()
    mine = np.ones(LARGE + 3, np.float32)
    plan = _engine.PlanOptions(2**23, lend=True)
    options = _engine.OpOptions(_engine.ReduceOp.SUM)
    fused = _engine.FusedAllreduce(comm, ["a"], [(mine.shape, mine.dtype)], options, plan)
    for number in range(6):
        single = keras_dist.allreduce(mine + number, "sum")
        [lent] = fused([mine])
        assert (single == (1 + number) * keras_dist.size()).all()
        assert (lent == keras_dist.size()).all()
