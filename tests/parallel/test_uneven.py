"""Ranks whose data ends earlier than that of others: `join`."""

import functools

import ml_dtypes
import numpy as np
import pytest

import keras_dist
from keras_dist import errors


# --- join by hand


def on_ranks_with_steps(counts, step):
    """Calls `step(number, here)` so often on each rank; returns what `join` says."""
    mine = counts[keras_dist.rank()]
    for number in range(mine):
        step(number, [rank for rank, count in enumerate(counts) if count > number])
    return keras_dist.join()


def counts_of(case):
    """So many batches for each rank: the first ranks or the last have more than the others."""
    n = keras_dist.size()
    return {
        "even": [3] * n,
        "one more on the last": [2] * (n - 1) + [3],
        "many more on the first": [7] + [2] * (n - 1),
        "another number on each": [1 + 2 * rank for rank in range(n)],
        "none on the last": [3] * (n - 1) + [0],
    }[case]


CASES = [
    "even",
    "one more on the last",
    "many more on the first",
    "another number on each",
    "none on the last",
]


def value_of(rank, number, dtype, count):
    return ((np.arange(count) + rank + 3 * number) % 5 + 1).astype(dtype)


@pytest.mark.parametrize("count", [3, 50_000])  # the latter is reduced in slices
@pytest.mark.parametrize("case", CASES)
def test_reductions_are_among_the_ranks_that_have_not_joined(case, count):
    counts = counts_of(case)
    operations = [("average", "float32"), ("sum", "int64"), ("min", "float64"), ("average", "int8")]
    operations += [("product", "float32"), ("max", "bool"), ("average", ml_dtypes.bfloat16)]
    # The first has its memory before any joins, the others are met while some have.
    keras_dist.allreduce(value_of(keras_dist.rank(), 0, "float32", count))

    def step(number, here):
        op, dtype = operations[number]
        values = [value_of(rank, number, dtype, count) for rank in here]
        stacked = np.stack(values).astype("float64" if op == "average" else dtype)
        wanted = {
            "average": lambda: stacked.mean(axis=0),
            "sum": lambda: stacked.sum(axis=0),
            "min": lambda: stacked.min(axis=0),
            "max": lambda: stacked.max(axis=0),
            "product": lambda: stacked.prod(axis=0),
        }[op]()
        mine = value_of(keras_dist.rank(), number, dtype, count)
        result = keras_dist.allreduce(mine, op)
        assert result.dtype == mine.dtype
        np.testing.assert_allclose(
            result.astype("float64"), wanted.astype(dtype).astype("float64"), rtol=1e-6
        )

    last = on_ranks_with_steps(counts, step)
    assert last == max(range(len(counts)), key=lambda rank: (counts[rank], rank))
    # And all are back.
    for _ in range(4):
        total = keras_dist.allreduce(value_of(keras_dist.rank(), 0, "float32", count), "sum")
        wanted = sum(value_of(rank, 0, "float32", count) for rank in range(keras_dist.size()))
        np.testing.assert_array_equal(total, wanted)


def test_factors_lists_and_rows_while_others_have_joined():
    me = keras_dist.rank()

    def step(number, here):
        factors = {"prescale_factor": 2.0, "postscale_factor": 0.5}
        lists = keras_dist.grouped_allreduce([1.0 + me, np.full(2, me)], "sum", **factors)
        assert float(lists[0]) == sum(1 + rank for rank in here)
        assert lists[1].tolist() == [sum(here)] * 2
        assert keras_dist.grouped_allreduce([]) == []
        rows, places = keras_dist.sparse_allreduce(np.full((2, 3), 1.0 + me), [me, 9])
        assert places.tolist() == [*here, 9]
        alone = [(1 + rank) / len(here) for rank in here]
        np.testing.assert_allclose(rows[:, 1], [*alone, sum(alone)])
        handle = keras_dist.allreduce_async(np.float32(me), "sum")
        assert keras_dist.synchronize(handle) == sum(here)

    on_ranks_with_steps(counts_of("another number on each"), step)
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


def test_ranks_join_on_their_process_sets_too():
    if keras_dist.size() < 3:
        pytest.skip("needs a set of some of the ranks")
    pair = keras_dist.add_process_set([0, keras_dist.size() - 1])
    try:
        for number in range(3):
            if keras_dist.rank() == 0:
                assert keras_dist.allreduce(5.0, process_set=pair) == 5
            elif number == 0:
                assert keras_dist.join() == keras_dist.size() - 1
        if keras_dist.rank() == 0:
            keras_dist.join()
        in_pair = keras_dist.rank() in (0, keras_dist.size() - 1)
        assert not in_pair or keras_dist.allreduce(1.0, "sum", process_set=pair) == 2
    finally:
        keras_dist.remove_process_set(pair)


@pytest.mark.parametrize(
    "operation",
    [
        keras_dist.allgather,
        keras_dist.broadcast_object,
        keras_dist.reducescatter,
        functools.partial(keras_dist.allreduce, op="adasum"),
    ],
    ids=["allgather", "broadcast_object", "reducescatter", "adasum"],
)
def test_what_needs_all_ranks_is_an_error_on_all(operation):
    n = keras_dist.size()
    if n == 1:
        pytest.skip("nobody else can have joined")
    keras_dist.barrier()
    with pytest.raises(errors.MismatchError, match=f"while ranks {n - 1} are out of data"):
        if keras_dist.rank() == n - 1:
            keras_dist.join()
        else:
            assert keras_dist.allreduce(1.0, "sum") == n - 1
            operation(np.ones(4, "float32"))
    assert keras_dist.allreduce(1.0, "sum") == n
    assert keras_dist.join() == n - 1


def test_ranks_that_differ_while_others_have_joined_are_told_so():
    if keras_dist.size() < 3:
        pytest.skip("two ranks are needed beside the one that joins")
    with pytest.raises(errors.MismatchError, match=r"shape \(2,\) as on rank 1"):
        if keras_dist.rank() == 0:
            keras_dist.join()
        else:
            keras_dist.allreduce(np.ones(1 + min(keras_dist.rank(), 1) + keras_dist.rank() // 2))
    assert keras_dist.join() == keras_dist.size() - 1
