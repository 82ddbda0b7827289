"""Arguments of alltoall, reducescatter, Adasum and others that are refused on every rank."""

import numpy as np
import pytest
from test_collectives import odd_one, raised, several

import keras_dist
from keras_dist import errors, runtime

pytestmark = pytest.mark.jobs("engine", "nodes-2x2")

RANK, SIZE = keras_dist.rank, keras_dist.size


# --- alltoall


@pytest.mark.parametrize(
    ("value", "splits", "text"),
    [
        (lambda n: 1.0, lambda n: None, "at least one dimension, to split along"),
        (lambda n: np.zeros(4), lambda n: [1] * (n + 1), "integers, one for each rank"),
        (lambda n: np.zeros(4), lambda n: [1.0] * n, "dtype float64"),
        (lambda n: np.zeros(4), lambda n: [[1] * n], "integers, one for each rank"),
        (lambda n: np.zeros(4), lambda n: [[1], [1, 2]], "splits to be a list"),
        (lambda n: np.zeros(4), lambda n: [5] + [0] * (n - 1), "4 together at most"),
        (lambda n: np.zeros(4), lambda n: [-1] * n, "at least 0 each"),
    ],
)
def test_invalid_splits_on_one_rank_are_an_error_on_every_rank(value, splits, text):
    size = SIZE()
    own = odd_one(np.zeros(4), value(size))
    texts = raised(
        errors.ArgumentError, lambda: keras_dist.alltoall(own, odd_one([0] * size, splits(size)))
    )
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"[rank {size - 1} of {size}] Expected ")
    assert text in texts[0]
    assert keras_dist.alltoall(np.zeros(size)).shape == (size,)


def test_a_length_not_divisible_by_ranks_needs_splits():
    several()
    message = raised(errors.ArgumentError, lambda: keras_dist.alltoall(np.zeros(SIZE() + 1)))[0]
    assert f"multiple of {SIZE()}. Received: {SIZE() + 1} rows. Pass splits" in message


# --- Adasum


def test_adasum_refuses_integers_and_sizes_not_a_power_of_two():
    if SIZE() & (SIZE() - 1):
        texts = raised(errors.ArgumentError, lambda: keras_dist.allreduce(1.0, "adasum"))
        assert "a power of two for Adasum. Received: 3 ranks. Start 2 or 4 ranks" in texts[0]
    else:
        texts = raised(errors.ArgumentTypeError, lambda: keras_dist.allreduce(1, "adasum"))
        assert "adasum is defined for. Received: int64" in texts[0]
    assert keras_dist.allreduce(1.0, "sum") == SIZE()


# --- Mismatches


@pytest.mark.parametrize(
    ("action", "expected", "received"),
    [
        (
            lambda: keras_dist.alltoall(np.zeros((SIZE(), odd_one(2, 3))), name="x"),
            "'x' with shape (-1, 2)",
            "(-1, 3)",
        ),
        (
            lambda: keras_dist.alltoall(np.zeros(SIZE(), odd_one("f4", "f8"))),
            "dtype float32",
            "float64",
        ),
        (
            lambda: keras_dist.reducescatter(np.zeros(odd_one(3, 4))),
            "shape (3,)",
            "(4,)",
        ),
        (
            lambda: keras_dist.reducescatter(np.zeros(()) if odd_one(0, 1) else np.zeros(2)),
            "shape (2,)",
            "()",
        ),
        (
            lambda: keras_dist.reducescatter([1.0], odd_one("sum", "average")),
            "op='sum' in reducescatter('value')",
            "op='average'",
        ),
        (
            lambda: keras_dist.reducescatter([1.0], prescale_factor=odd_one(1, 2)),
            "prescale_factor=1.0 in reducescatter('value')",
            "prescale_factor=2.0",
        ),
        (
            lambda: keras_dist.grouped_reducescatter([[1.0]] * odd_one(2, 3)),
            "2 arrays in reducescatter",
            "3 arrays",
        ),
        (
            lambda: keras_dist.grouped_allgather([[1.0], np.zeros((1, odd_one(2, 3)))], "x"),
            "'x[1]' with shape (-1, 2)",
            "(-1, 3)",
        ),
        (
            lambda: keras_dist.allreduce(1.0, prescale_factor=odd_one(1, 0.5)),
            "prescale_factor=1.0 in allreduce('value')",
            "prescale_factor=0.5",
        ),
        (
            lambda: keras_dist.grouped_allreduce([1.0], postscale_factor=odd_one(3, 1)),
            "postscale_factor=3.0",
            "postscale_factor=1.0",
        ),
        (
            lambda: keras_dist.broadcast_([np.zeros(odd_one(3, 4))], 0, "w"),
            "'w' with shape (3,)",
            "(4,)",
        ),
        (
            lambda: keras_dist.broadcast_([np.zeros(3)], odd_one(0, 1)),
            "root_rank=0 in broadcast_",
            "root_rank=1",
        ),
        (
            lambda: keras_dist.allreduce(1.0, odd_one("adasum", "sum")),
            "op='adasum'",
            "op='sum'",
        ),
        (
            lambda: keras_dist.allreduce(1.0, odd_one("sum", "adasum")),
            "op='sum'",
            "op='adasum'",
        ),
        (
            lambda: keras_dist.allreduce(np.zeros(odd_one(2, 3)), "adasum"),
            "shape (2,)",
            "(3,)",
        ),
        (
            lambda: odd_one(keras_dist.alltoall, keras_dist.reducescatter)(np.zeros(SIZE())),
            "alltoall('value')",
            "reducescatter('value')",
        ),
    ],
)
def test_a_mismatch_raises_the_same_error_on_every_rank_and_the_job_continues(
    action, expected, received
):
    several()
    texts = raised(errors.MismatchError, action)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"[rank {SIZE() - 1} of {SIZE()}] Expected ")
    assert expected in texts[0]
    assert received in texts[0].split("Received: ")[1]
    assert keras_dist.allreduce(1.0, "sum") == SIZE()
    assert keras_dist.alltoall(np.zeros(SIZE())).shape == (SIZE(),)


def read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("kind", "action", "text"),
    [
        (errors.ArgumentError, lambda: keras_dist.reducescatter(1.0), "to scatter along"),
        (errors.ArgumentError, lambda: keras_dist.reducescatter([1.0], "max"), "Average or Sum"),
        (
            errors.ArgumentError,
            lambda: keras_dist.reducescatter([1.0], "adasum"),
            "Average or Sum",
        ),
        (errors.ArgumentTypeError, lambda: keras_dist.reducescatter([True]), "bool"),
        (errors.ArgumentError, lambda: keras_dist.grouped_allgather([[1], 1]), "values[1]"),
        (errors.ArgumentTypeError, lambda: keras_dist.allgather([None]), "hold numbers"),
        (
            errors.ArgumentTypeError,
            lambda: keras_dist.allreduce(1.0, prescale_factor="2"),
            "prescale_factor to be a finite number. Received: '2' of type str",
        ),
        (
            errors.ArgumentError,
            lambda: keras_dist.allreduce(1.0, postscale_factor=np.inf),
            "postscale_factor to be a finite number",
        ),
        (
            errors.ArgumentTypeError,
            lambda: keras_dist.allreduce([True], "max", prescale_factor=2),
            "can multiply. Received: bool",
        ),
        (errors.ArgumentTypeError, lambda: keras_dist.broadcast_([[1.0]]), "a numpy array"),
        (errors.ArgumentTypeError, lambda: keras_dist.broadcast_([np.array([None])]), "object"),
        (errors.ArgumentError, lambda: keras_dist.broadcast_([read_only()]), "read-only"),
        (errors.ArgumentError, lambda: keras_dist.broadcast_([], SIZE()), "root_rank"),
    ],
)
def test_messages_of_invalid_arguments(kind, action, text):
    for rank, message in enumerate(raised(kind, action)):
        assert message.startswith(f"[rank {rank} of {SIZE()}] Expected ")
        assert text in message
        assert message.endswith(".")
    assert keras_dist.allreduce(1.0, "sum") == SIZE()


def test_objects_in_alltoall_are_an_error_on_every_rank():
    own = odd_one(np.array([None] * SIZE()), np.array([None] * SIZE()))
    texts = raised(errors.ArgumentTypeError, lambda: keras_dist.alltoall(own))
    assert len(set(texts)) == 1
    assert "hold numbers" in texts[0]
    assert runtime.communicator().size == SIZE()


# --- sparse_allreduce


@pytest.mark.parametrize(
    ("kind", "values", "indices", "op", "text"),
    [
        (errors.ArgumentError, np.zeros((2, 3)), [1], "sum", "to have shape (2,)"),
        (errors.ArgumentError, np.zeros((2, 3)), [[1], [2]], "sum", "shape (2, 1)"),
        (errors.ArgumentError, np.zeros((2, 3)), [1, 2], "max", "Average or Sum"),
        (errors.ArgumentError, np.float64(1), np.zeros((), int), "sum", "at least one dimension"),
        (errors.ArgumentTypeError, np.zeros((2, 3)), [1.0, 2.0], "sum", "integers"),
        (errors.ArgumentTypeError, np.zeros((2, 3), bool), [1, 2], "sum", "dtype that sum"),
    ],
)
def test_sparse_allreduce_refuses_invalid_rows_and_indices(kind, values, indices, op, text):
    texts = raised(kind, lambda: keras_dist.sparse_allreduce(values, indices, op, "table"))
    assert len(set(texts)) == 1
    assert text in texts[0]
    assert keras_dist.sparse_allreduce([1.0], [3], "sum")[0] == SIZE()


def test_invalid_indices_on_one_rank_are_an_error_on_every_rank():
    indices = odd_one([1, 2], [1, 2, 3])
    texts = raised(
        errors.ArgumentError, lambda: keras_dist.sparse_allreduce(np.zeros((2, 3)), indices)
    )
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"[rank {SIZE() - 1} of {SIZE()}] Expected the indices of values")
    assert "Received: shape (3,)." in texts[0]


@pytest.mark.parametrize(
    ("width", "dtype", "op", "text"),
    [
        (4, "i8", "sum", "with shape (-1, 3)"),
        (3, "i4", "sum", "dtype int64"),
        (3, "i8", "average", "op='sum'"),
    ],
)
def test_sparse_allreduce_detects_mismatches(width, dtype, op, text):
    several()
    values, indices = np.zeros((2, odd_one(3, width))), np.array([1, 2], odd_one("i8", dtype))
    op = odd_one("sum", op)
    texts = raised(errors.MismatchError, lambda: keras_dist.sparse_allreduce(values, indices, op))
    assert len(set(texts)) == 1
    assert text in texts[0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_averages_of_rows_are_exact_if_the_sum_of_a_rank_overflows(dtype):
    limits = np.iinfo(dtype)
    twice = np.full(2, limits.max if RANK() % 2 else limits.min, dtype)
    rows, _ = keras_dist.sparse_allreduce(twice, np.array([3, 3]))
    total = sum(2 * int(limits.max if rank % 2 else limits.min) for rank in range(SIZE()))
    mean = abs(total) // SIZE() * (1 if total > 0 else -1)
    assert rows[0] == mean or not limits.min <= mean <= limits.max
