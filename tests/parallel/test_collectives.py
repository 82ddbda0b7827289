"""Every collective on real ranks, against numpy."""

import time

import ml_dtypes
import numpy as np
import pytest
from bits import equal_on_all

import keras_dist
from keras_dist import _engine, errors, runtime

pytestmark = pytest.mark.jobs("engine", "tensorflow-1", "nodes-2+1", "openmpi-2")

OPS = {
    "sum": lambda rows: rows.sum(axis=0),
    "average": lambda rows: rows.mean(axis=0),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
    "product": lambda rows: rows.prod(axis=0),
}
FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


def contribution(rank, shape, dtype):
    """The input of a rank: integers, which every dtype represents exactly."""
    return np.random.default_rng([rank, *shape]).integers(0, 4, shape).astype(dtype)


def rows(shape, dtype):
    return np.stack([contribution(r, shape, dtype) for r in range(keras_dist.size())])


def test_the_arguments_of_old_scripts():
    with pytest.warns(DeprecationWarning, match=r"pass op=hvd\.Sum"):
        assert keras_dist.allreduce(1, average=False) == keras_dist.size()
    with pytest.raises(errors.ArgumentError, match="either op or average"):
        keras_dist.allreduce(1, "sum", average=True)
    with pytest.raises(errors.ArgumentError, match="a name is passed as name="):
        keras_dist.allreduce(1, "loss")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (40_001,)])
def test_allreduce_equals_numpy(op, dtype, shape):
    result = keras_dist.allreduce(contribution(keras_dist.rank(), shape, dtype), op)
    expected = OPS[op](rows(shape, dtype).astype(np.float64))
    if np.issubdtype(dtype, np.integer):
        expected = np.trunc(expected)
    assert result.dtype == dtype
    assert result.shape == shape
    rounding = 0 if np.issubdtype(dtype, np.integer) else float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(
        result.astype(np.float64),
        expected.astype(dtype).astype(np.float64),
        rtol=2 * rounding,
        atol=2 * rounding * np.abs(expected).max(initial=0),
    )


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_are_summed(dtype):
    mine = np.array([1 + 2j, 3j], dtype) * (keras_dist.rank() + 1)
    total = sum(r + 1 for r in range(keras_dist.size()))
    np.testing.assert_allclose(keras_dist.allreduce(mine, "sum"), np.array([1 + 2j, 3j]) * total)


def test_booleans():
    mine = np.array([True, keras_dist.rank() == 0, False])
    alone = keras_dist.size() == 1
    np.testing.assert_array_equal(keras_dist.allreduce(mine, "min"), [True, alone, False])
    np.testing.assert_array_equal(keras_dist.allreduce(mine, "max"), [True, True, False])


@pytest.mark.parametrize("count", [7, 5_000, 100_003])
def test_results_have_the_same_bits_on_all_ranks_and_in_every_run(count):
    mine = np.random.default_rng(keras_dist.rank()).standard_normal(count).astype(np.float32)
    first = keras_dist.allreduce(mine)
    again = keras_dist.allreduce(mine)
    assert first.tobytes() == again.tobytes()
    assert equal_on_all(first.tobytes())


@pytest.mark.parametrize("bucket_nbytes", [1, 1000, 10**9])
def test_bucket_sizes_do_not_change_the_bits(bucket_nbytes):
    rng = np.random.default_rng(keras_dist.rank())
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (1, 300, 0, 9_000, 17)]
    names = [str(index) for index in range(len(arrays))]
    fused = _engine.collectives.allreduce(
        runtime.communicator(), arrays, names, _engine.OpOptions(), bucket_nbytes
    )
    for array, result in zip(arrays, fused, strict=True):
        assert result.tobytes() == keras_dist.allreduce(array).tobytes()


def test_grouped_allreduce_mixes_dtypes_and_shapes():
    rank, size = keras_dist.rank(), keras_dist.size()
    values = [rank, np.full((2, 3), rank, np.float32), np.full(4, rank, np.float64), np.zeros(0)]
    results = keras_dist.grouped_allreduce(values, keras_dist.Sum)
    total = size * (size - 1) // 2
    assert results[0] == total
    assert results[0].dtype == np.int64
    np.testing.assert_array_equal(results[1], np.full((2, 3), total))
    np.testing.assert_array_equal(results[2], np.full(4, total))
    assert results[3].shape == (0,)
    assert keras_dist.grouped_allreduce([]) == []


def test_strided_input_is_read_in_its_order():
    base = np.arange(24.0).reshape(4, 6) + keras_dist.rank()
    mean = (keras_dist.size() - 1) / 2
    expected = (np.arange(24.0).reshape(4, 6) + mean).T[::2]
    np.testing.assert_allclose(keras_dist.allreduce(base.T[::2]), expected)


def test_the_input_is_left_alone_and_the_result_is_new():
    mine = np.full(10, keras_dist.rank(), np.float32)
    result = keras_dist.allreduce(mine, "sum")
    result += 1
    np.testing.assert_array_equal(mine, keras_dist.rank())


def test_allgather_concatenates_different_numbers_of_rows():
    rank, size = keras_dist.rank(), keras_dist.size()
    joined = keras_dist.allgather(np.full((rank, 2), rank, np.int16))
    expected = np.concatenate([np.full((r, 2), r, np.int16) for r in range(size)])
    np.testing.assert_array_equal(joined, expected)
    assert joined.dtype == np.int16


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, np.bool_, np.complex64])
def test_allgather_takes_every_dtype(dtype):
    mine = contribution(keras_dist.rank(), (2, 3), dtype)
    everyone = [contribution(r, (2, 3), dtype) for r in range(keras_dist.size())]
    np.testing.assert_array_equal(keras_dist.allgather(mine), np.concatenate(everyone))


def test_allgather_of_rows_without_elements():
    assert keras_dist.allgather(np.zeros((3, 0))).shape == (3 * keras_dist.size(), 0)


def test_broadcast_from_every_root():
    for root in range(keras_dist.size()):
        for dtype in (*FLOATS, *INTEGERS, np.bool_, np.complex64):
            mine = contribution(keras_dist.rank(), (3, 2), dtype)
            received = keras_dist.broadcast(mine, root)
            np.testing.assert_array_equal(received, contribution(root, (3, 2), dtype))


@pytest.mark.parametrize("dtype", [">i8", ">f4", ">f2", ">c8"])
def test_results_have_native_byte_order(dtype):
    size, given = keras_dist.size(), np.arange(1, 5).astype(dtype)
    rows = np.tile(given, (size, 1))
    out = np.empty_like(given)
    total = (given * size).tolist()
    for _ in range(3):  # the ordinary way, and that of a call like an earlier one
        found = {
            "allreduce": (keras_dist.allreduce(given, op=keras_dist.Sum), total),
            "grouped": (keras_dist.grouped_allreduce([given, given])[1], given.tolist()),
            "queued": (keras_dist.synchronize(keras_dist.allreduce_async(given)), given.tolist()),
            "allgather": (keras_dist.allgather(given), given.tolist() * size),
            "grouped_allgather": (keras_dist.grouped_allgather([given])[0], given.tolist() * size),
            "broadcast": (keras_dist.broadcast(given), given.tolist()),
            "alltoall": (keras_dist.alltoall(rows), rows.tolist()),
            "reducescatter": (keras_dist.reducescatter(rows), rows[:1].tolist()),
            "broadcast_object": (keras_dist.broadcast_object(given), given.tolist()),
            "allgather_object": (keras_dist.allgather_object(given)[0], given.tolist()),
            "sparse": (
                keras_dist.sparse_allreduce(rows[:1], np.zeros(1, ">i8"))[0],
                [rows[0].tolist()],
            ),
        }
        for name, (result, expected) in found.items():
            assert result.dtype.isnative, name
            assert result.dtype == np.dtype(dtype).newbyteorder("=") and result.tolist() == expected
        # Arrays of the caller keep theirs.
        assert keras_dist.allreduce(given, op=keras_dist.Sum, out=out) is out
        assert out.tolist() == total and out.dtype == dtype
    keras_dist.broadcast_([out])
    assert out.tolist() == total


def test_objects():
    rank, size = keras_dist.rank(), keras_dist.size()
    assert keras_dist.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    for root in range(size):
        assert keras_dist.broadcast_object(("root", rank), root) == ("root", root)
    large = b"x" * (rank * 100_000)
    assert [len(part) for part in keras_dist.allgather_object(large)] == [
        r * 100_000 for r in range(size)
    ]


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


# --- Bad input: the same error on every rank, after which the job continues


def raised(kind, action):
    """Returns the message of the error of `action`; fails if it differs between ranks."""
    with pytest.raises(kind) as caught:
        action()
    texts = keras_dist.allgather_object(str(caught.value))
    return texts


def several():
    if keras_dist.size() == 1:
        pytest.skip("ranks cannot differ when there is one")


def odd_one(usual, odd):
    """Returns `odd` on the last rank and `usual` on the others."""
    return odd if keras_dist.rank() == keras_dist.size() - 1 else usual


@pytest.mark.parametrize(
    ("action", "expected", "received"),
    [
        (
            lambda: keras_dist.allreduce(np.zeros(odd_one(3, 4)), name="loss"),
            "'loss' with shape (3,)",
            "(4,)",
        ),
        (
            lambda: keras_dist.allreduce(np.zeros(3, odd_one("f4", "f8"))),
            "dtype float32",
            "float64",
        ),
        (lambda: keras_dist.allreduce(1.0, odd_one("sum", "max")), "op='sum'", "op='max'"),
        (
            lambda: keras_dist.allreduce(1.0, name=odd_one("loss", "accuracy")),
            "name='loss'",
            "name='accuracy'",
        ),
        (lambda: keras_dist.broadcast(1.0, odd_one(0, 1)), "root_rank=0", "root_rank=1"),
        (
            lambda: keras_dist.allgather(np.zeros((2, odd_one(3, 4)))),
            "shape (-1, 3)",
            "(-1, 4)",
        ),
        (
            lambda: odd_one(keras_dist.barrier, lambda: keras_dist.allreduce(1.0))(),
            "barrier",
            "allreduce('value')",
        ),
        (
            lambda: keras_dist.grouped_allreduce([1.0] * odd_one(2, 3)),
            "2 arrays",
            "3 arrays",
        ),
    ],
)
def test_ranks_that_differ_raise_the_same_error_and_continue(action, expected, received):
    several()
    texts = raised(errors.MismatchError, action)
    assert len(set(texts)) == 1
    last = keras_dist.size() - 1
    assert texts[0].startswith(f"[rank {last} of {keras_dist.size()}] Expected ")
    assert expected in texts[0]
    assert received in texts[0].split("Received: ")[1]
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


@pytest.mark.parametrize(
    ("kind", "action", "text"),
    [
        (errors.ArgumentError, lambda: keras_dist.allreduce(1.0, "mean"), "op to be one of"),
        (
            errors.ArgumentError,
            lambda: keras_dist.broadcast(1.0, keras_dist.size()),
            "root_rank to be a rank of this job",
        ),
        (errors.ArgumentError, lambda: keras_dist.broadcast(1.0, -1), "Received: -1"),
        (errors.ArgumentError, lambda: keras_dist.broadcast_object(1.0, "0"), "Received: '0'"),
        (errors.ArgumentError, lambda: keras_dist.allgather(1.0), "at least one dimension"),
        (errors.ArgumentTypeError, lambda: keras_dist.allreduce("text"), "<U4"),
        (ValueError, lambda: keras_dist.allreduce("text"), "<U4"),  # as Horovod's scripts expect
        (errors.ArgumentTypeError, lambda: keras_dist.allreduce([True], "sum"), "bool"),
        (errors.ArgumentTypeError, lambda: keras_dist.allreduce(np.array([None])), "object"),
        (errors.ArgumentTypeError, lambda: keras_dist.broadcast([None]), "broadcast_object"),
    ],
)
def test_bad_arguments_say_where_what_and_the_remedy(kind, action, text):
    for rank, message in enumerate(raised(kind, action)):
        assert message.startswith(f"[rank {rank} of {keras_dist.size()}] Expected ")
        assert text in message
        assert message.endswith(".")
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


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
    odd = keras_dist.rank() == keras_dist.size() - 1

    class Local(Unreadable):  # cannot be pickled either
        pass

    with pytest.raises((errors.ArgumentError, TypeError, AttributeError)) as caught:
        call(Local() if odd else np.ones((6, 1)))
    if keras_dist.size() > 1:
        assert "read. Received: " in str(caught.value)
    assert keras_dist.allreduce(float(keras_dist.rank()), "sum") == sum(range(keras_dist.size()))
    assert keras_dist.allgather_object(keras_dist.rank()) == list(range(keras_dist.size()))
