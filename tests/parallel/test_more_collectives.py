"""alltoall, reducescatter, Adasum, factors, groups and in-place broadcast, against numpy."""

import ml_dtypes
import numpy as np
import pytest
from test_collectives import FLOATS, INTEGERS, contribution, odd_one, raised, rows, several

import keras_dist
from keras_dist import errors, runtime

pytestmark = pytest.mark.jobs("engine", "nodes-2x2")

RANK, SIZE = keras_dist.rank, keras_dist.size
EVERY = [*FLOATS, *INTEGERS, np.bool_, np.complex64]


def cut(count, size, rank):
    """Returns the rows of a rank: one more on each of the first `count % size` ranks."""
    ends = np.cumsum([count // size + (r < count % size) for r in range(size)])
    return slice(int(ends[rank]) - (count // size + (rank < count % size)), int(ends[rank]))


def power_of_two():
    if SIZE() & (SIZE() - 1):
        pytest.skip("Adasum needs a power of two ranks")


def assert_same_rows(found, reduced):
    """Checks a scattered result against the reduced array, bit by bit within a node.

    Between nodes an allreduce adds up each node first, so its order is another one.
    """
    expected = reduced[cut(len(reduced), SIZE(), RANK())]
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if runtime.communicator().is_one_node:
        assert found.tobytes() == expected.tobytes()
    else:
        tolerance = 1e-12 if found.dtype == np.float64 else 1e-5
        np.testing.assert_allclose(found.astype("f8"), expected.astype("f8"), rtol=tolerance)


# --- alltoall


@pytest.mark.parametrize("dtype", EVERY)
def test_alltoall_without_splits_sends_equal_numbers_of_rows(dtype):
    of_all = [contribution(r, (2 * SIZE(), 3), dtype) for r in range(SIZE())]
    result = keras_dist.alltoall(of_all[RANK()])
    own = slice(2 * RANK(), 2 * RANK() + 2)
    np.testing.assert_array_equal(result, np.concatenate([each[own] for each in of_all]))
    assert result.dtype == dtype


def splits_of(kind, rank, size):
    """Returns the number of rows that a rank sends to each rank, in several patterns."""
    return {
        "by receiver": [r + 1 for r in range(size)],
        "by both": [(rank + 2 * r) % 3 for r in range(size)],
        "one sends nothing": [0 if rank == 0 else 2] * size,
        "one receives nothing": [0] + [rank + 1] * (size - 1),
        "nothing at all": [0] * size,
    }[kind]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize(
    "kind",
    ["by receiver", "by both", "one sends nothing", "one receives nothing", "nothing at all"],
)
def test_alltoall_with_splits(kind, surplus, dtype):
    rank, size = RANK(), SIZE()
    table = np.array([splits_of(kind, r, size) for r in range(size)])
    of_all = [contribution(r, (table[r].sum() + surplus, 2), dtype) for r in range(size)]
    result, received = keras_dist.alltoall(of_all[rank], splits_of(kind, rank, size))
    starts = np.cumsum(table, axis=1) - table
    parts = [of_all[r][starts[r, rank] : starts[r, rank] + table[r, rank]] for r in range(size)]
    np.testing.assert_array_equal(result, np.concatenate(parts))
    assert result.shape == (table[:, rank].sum(), 2)
    np.testing.assert_array_equal(received, table[:, rank])
    assert received.dtype == np.int64


def test_alltoall_of_empty_rows_and_strided_arrays():
    assert keras_dist.alltoall(np.zeros((2 * SIZE(), 0))).shape == (2 * SIZE(), 0)
    assert keras_dist.alltoall(np.zeros((0, 4), np.int8)).shape == (0, 4)
    base = np.arange(3 * SIZE()).reshape(3, SIZE()).T
    result = keras_dist.alltoall(base)
    np.testing.assert_array_equal(result, np.stack([base[RANK()]] * SIZE()))


def test_alltoall_returns_a_new_array():
    own = np.zeros(SIZE())
    keras_dist.alltoall(own)[...] = 1
    np.testing.assert_array_equal(own, 0)


def test_alltoall_with_received_splits_is_the_inverse():
    own = contribution(RANK(), (50, 3), np.float32)
    splits = np.random.default_rng(RANK()).multinomial(50, np.full(SIZE(), 1 / SIZE()))
    there, received = keras_dist.alltoall(own, splits)
    back, again = keras_dist.alltoall(there, received)
    np.testing.assert_array_equal(back, own)
    np.testing.assert_array_equal(again, splits)


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


# --- reducescatter


@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("shape", [(0,), (1,), (7, 2), (12, 0), (30_001,)])
def test_reducescatter_equals_allreduce_bit_by_bit(shape, dtype, op):
    own = contribution(RANK(), shape, dtype)
    if dtype in FLOATS:
        own = (own / 7).astype(dtype)
    result = keras_dist.reducescatter(own, op)
    assert_same_rows(result, keras_dist.allreduce(own, op))


def test_reducescatter_equals_numpy():
    result = keras_dist.reducescatter(contribution(RANK(), (10, 3), np.float64), "sum")
    expected = rows((10, 3), np.float64).sum(axis=0)[cut(10, SIZE(), RANK())]
    np.testing.assert_array_equal(result, expected)


def test_grouped_reducescatter_mixes_dtypes_and_shapes():
    shapes = [((5, 2), np.float32), ((2,), np.int16), ((9,), ml_dtypes.bfloat16), ((0, 3), "f8")]
    own = [contribution(RANK(), shape, dtype) for shape, dtype in shapes]
    results = keras_dist.grouped_reducescatter(own, keras_dist.Sum)
    for value, result in zip(own, results, strict=True):
        assert result.tobytes() == keras_dist.reducescatter(value, "sum").tobytes()
        assert result.shape[1:] == value.shape[1:]
    assert keras_dist.grouped_reducescatter([]) == []


def test_reducescatter_does_not_change_its_argument():
    own = np.ones((4, 2)).T
    keras_dist.reducescatter(own, "sum", postscale_factor=2)[...] = 5
    np.testing.assert_array_equal(own, 1)


# --- grouped_allgather


def test_grouped_allgather_equals_allgather():
    rank = RANK()
    own = [
        contribution(rank, (rank, 2), np.int16),
        contribution(rank, (3,), ml_dtypes.bfloat16),
        np.zeros((rank + 1, 0), np.float32),
        contribution(rank, (2 - rank % 2, 2, 2), np.bool_),
    ]
    for value, result in zip(own, keras_dist.grouped_allgather(own), strict=True):
        expected = keras_dist.allgather(value)
        assert result.dtype == value.dtype
        np.testing.assert_array_equal(result, expected)
    gathered = keras_dist.grouped_allgather([np.full((rank, 2), rank)])
    expected = np.concatenate([np.full((r, 2), r) for r in range(SIZE())])
    np.testing.assert_array_equal(gathered[0], expected)
    assert keras_dist.grouped_allgather([]) == []


# --- Factors


def scaled(array, factor):
    """Returns an array times a factor: a second implementation."""
    if np.issubdtype(array.dtype, np.integer):
        return np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    wide = np.float32 if array.dtype.itemsize < 4 else array.dtype
    return (array.astype(wide) * np.asarray(factor, wide)).astype(array.dtype)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize(("pre", "post"), [(0.5, 1), (1, 2.5), (0.7, 1.3), (0, 1), (3, 1 / 3)])
@pytest.mark.parametrize("count", [9, 50_000])
def test_factors_before_and_after_the_reduction(count, pre, post, dtype):
    own = contribution(RANK(), (count,), dtype)
    for op in ("sum", "average"):
        result = keras_dist.allreduce(own, op, None, pre, post)
        expected = scaled(keras_dist.allreduce(scaled(own, pre), op), post)
        assert result.dtype == dtype
        assert result.tobytes() == expected.tobytes()
        assert_same_rows(keras_dist.reducescatter(own, op, None, pre, post), expected)
    np.testing.assert_array_equal(own, contribution(RANK(), (count,), dtype))


def test_factors_against_computed_numbers():
    ints = np.array([3, -3, 7])
    np.testing.assert_array_equal(
        keras_dist.allreduce(ints, "sum", prescale_factor=0.5), np.array([1, -1, 3]) * SIZE()
    )
    np.testing.assert_array_equal(
        keras_dist.allreduce(ints, "sum", postscale_factor=0.5), np.trunc(ints * SIZE() / 2)
    )
    assert keras_dist.allreduce(2 + 1j, "sum", postscale_factor=0.5) == (1 + 0.5j) * SIZE()
    assert keras_dist.allreduce(4.0, "max", prescale_factor=np.float32(-2)) == -8


def test_factors_of_a_group_do_not_change_arguments():
    large = np.full(2**21, RANK() + 1, np.float32)
    for _ in range(2):
        small, big = keras_dist.grouped_allreduce([1, large], "sum", None, 2, 0.5)
        assert small == SIZE()
        np.testing.assert_array_equal(big, SIZE() * (SIZE() + 1) / 2)
    np.testing.assert_array_equal(large, RANK() + 1)


# --- broadcast_


def test_broadcast_in_place_from_every_root():
    for root in range(SIZE()):
        arrays = [
            contribution(RANK(), (3, 2), dtype) for dtype in (np.float32, ml_dtypes.bfloat16, "?")
        ]
        base = np.zeros((4, 6), np.int64)
        strided, scalar, empty = base.T[::2], np.array(float(RANK())), np.zeros((0, 2))
        strided[...] = RANK() + 1
        assert keras_dist.broadcast_([*arrays, strided, scalar, empty], root) is None
        for array in arrays:
            np.testing.assert_array_equal(array, contribution(root, (3, 2), array.dtype))
        np.testing.assert_array_equal(base[:, ::2], root + 1)
        np.testing.assert_array_equal(base[:, 1::2], 0)
        assert scalar == root
    keras_dist.broadcast_([])


# --- Adasum


def pair(a, b):
    dot, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    return a * (1 - dot / (2 * aa) if aa else 1) + b * (1 - dot / (2 * bb) if bb else 1)


def tree(vectors):
    while len(vectors) > 1:
        vectors = [pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (10_001,)])
def test_adasum_equals_its_formula(shape, dtype):
    power_of_two()
    of_all = [
        np.asarray(np.random.default_rng([r, 5]).standard_normal(shape)).astype(dtype)
        for r in range(SIZE())
    ]
    result = keras_dist.allreduce(of_all[RANK()], keras_dist.Adasum)
    expected = tree([each.astype(np.float64) for each in of_all])
    assert result.dtype == dtype
    assert result.shape == shape
    tolerance = {2: 1e-2, 4: 1e-5, 8: 1e-12}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(result.astype(np.float64), expected, tolerance, tolerance)
    assert len(set(keras_dist.allgather_object(result.tobytes()))) == 1
    assert keras_dist.allreduce(of_all[RANK()], "adasum").tobytes() == result.tobytes()


def test_adasum_adds_orthogonal_and_averages_parallel_values():
    power_of_two()
    own = np.zeros(SIZE(), np.float32)
    own[RANK()] = RANK() + 1
    np.testing.assert_array_equal(keras_dist.allreduce(own, "adasum"), np.arange(SIZE()) + 1)
    same = np.array([3.0, -4.0])
    np.testing.assert_allclose(keras_dist.allreduce(same, "adasum"), same)
    np.testing.assert_array_equal(keras_dist.allreduce(np.zeros(3), "adasum"), 0)
    alone = np.full(3, float(RANK() == 0))
    np.testing.assert_array_equal(keras_dist.allreduce(alone, "adasum"), 1)


def test_adasum_combines_each_value_of_a_group_separately():
    power_of_two()
    rng = np.random.default_rng(RANK())
    values = [rng.standard_normal(n).astype(t) for n, t in [(7, "f4"), (300, "f8"), (0, "f4")]]
    for value, result in zip(
        values, keras_dist.grouped_allreduce(values, "adasum", None, 0.5, 4), strict=True
    ):
        single = keras_dist.allreduce(value, "adasum", None, 0.5, 4)
        assert result.tobytes() == single.tobytes()
        plain = keras_dist.allreduce(value, "adasum")
        np.testing.assert_allclose(single, plain * 2, rtol=1e-5, atol=1e-6)
    assert keras_dist.grouped_allreduce([], "adasum") == []


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


@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, np.complex64])
def test_sparse_allreduce_is_the_allreduce_of_the_table(dtype, op):
    # Ranks have different numbers of rows, rank 0 none, and some indices occur twice.
    count = 5 * RANK()
    values = contribution(RANK(), (count, 3), dtype)
    indices = np.random.default_rng(RANK()).integers(0, 8, count).astype(np.int32)
    table = np.zeros((8, 3), dtype)
    np.add.at(table, indices, values)
    rows, places = keras_dist.sparse_allreduce(values, indices, op)
    everywhere = np.unique(keras_dist.allgather(indices))
    np.testing.assert_array_equal(places, everywhere)
    assert (rows.dtype, places.dtype) == (dtype, np.int32)
    np.testing.assert_array_equal(rows, keras_dist.allreduce(table, op)[everywhere])
    assert len(set(keras_dist.allgather_object(rows.tobytes()))) == 1


def test_sparse_allreduce_sums_16_bit_floats_in_float32():
    # In float16, 2048 + 1 is 2048.
    count = 3 if RANK() == 0 else 0
    values, indices = np.array([2048, 1, 1], np.float16)[:count], np.full(count, 4)
    rows, _ = keras_dist.sparse_allreduce(values, indices, "sum")
    np.testing.assert_array_equal(rows, np.array([2050], np.float16))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("count", [9, 50_000])
def test_averages_of_integers_are_exact_if_their_sum_overflows(count, dtype):
    limits = np.iinfo(dtype)
    extremes = [limits.min, limits.min // 2, limits.min + 1, limits.max // 2 + 1, limits.max]
    of_all = np.resize(np.array(extremes, dtype), (SIZE(), count))
    of_all[1:, :2] = of_all[0, :2]  # equal on all ranks
    total = of_all.astype(object).sum(axis=0)
    expected = np.array([int(abs(n)) // SIZE() * (1 if n > 0 else -1) for n in total], dtype)
    own = of_all[RANK()]
    np.testing.assert_array_equal(keras_dist.allreduce(own), expected)
    assert_same_rows(keras_dist.reducescatter(own), expected)
    whole, where = keras_dist.sparse_allreduce(own, np.arange(count))
    np.testing.assert_array_equal(whole, expected)
    assert len(where) == count
    # The sum of a rank's duplicates may overflow if the average does not.
    twice = np.array([limits.max, limits.max] if RANK() % 2 else [limits.min, limits.min], dtype)
    rows, _ = keras_dist.sparse_allreduce(twice, np.array([3, 3]))
    sums = [2 * int(limits.max if rank % 2 else limits.min) for rank in range(SIZE())]
    mean = abs(sum(sums)) // SIZE() * (1 if sum(sums) > 0 else -1)
    assert rows[0] == mean if limits.min <= mean <= limits.max else True


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
