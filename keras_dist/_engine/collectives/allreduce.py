"""allreduce: one value from the contributions of all ranks, the same bits on each."""

from collections.abc import Callable, Sequence

import numpy as np

from keras_dist._engine.agreement import Call, Entry
from keras_dist._engine.buckets import Bucket, plan_buckets
from keras_dist._engine.collectives.meet import meet
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.reduce import ReduceOp, check_dtype, reduce_rows

__all__ = ["FusedAllreduce", "allreduce"]

# Up to here every rank reduces everything itself: one message in place of two.
SMALL_NBYTES = 32 * 1024


class FusedAllreduce:
    """Reduces the same list of arrays again and again, fused into buckets.

    The plan is made once. The ranks compare it at every bucket, by a digest that was made
    with it, so a rank that holds other arrays is found before data moves.

    Args:
        comm: the ranks.
        names: what the arrays are called in messages.
        specs: shape and dtype of each array.
        op: the reduction.
        bucket_nbytes: the size, in bytes, at which a bucket is closed.
        operation: what the call is called in messages.
        key: a name under which the ranks must meet; `None` for none.
        remedy: what a user should do when the ranks differ.

    Raises:
        ArgumentTypeError: `op` is not defined for one of the dtypes.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        op: ReduceOp,
        bucket_nbytes: int,
        operation: str = "allreduce",
        key: str | None = None,
        remedy: str = Call.remedy,
    ):
        for name, (_, dtype) in zip(names, specs, strict=True):
            check_dtype(dtype, op, comm.where(), name)
        self.comm = comm
        self.op = op
        self.buckets = plan_buckets(specs, bucket_nbytes)
        entries = tuple(
            Entry(name, tuple(shape), str(dtype))
            for name, (shape, dtype) in zip(names, specs, strict=True)
        )
        self.call = Call(operation, entries, op=op.value, key=key, remedy=remedy)

    def reduce_bucket(self, bucket: Bucket, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reduces the arrays of one bucket.

        Collective: every rank, bucket after bucket in the order of `buckets`; blocks.

        Args:
            bucket: one of `buckets`.
            arrays: this rank's arrays, in the order of the bucket's slots.

        Returns:
            The reduced arrays, in the same order: views of one new buffer.
        """
        with self.comm.lock:
            meet(self.comm, self.call)
            return bucket.unpack(_reduce_flat(self.comm, bucket.pack(arrays), self.op))

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reduces the whole list. Collective: every rank; blocks. Returns new arrays."""
        reduced: dict[int, np.ndarray] = {}
        for bucket in self.buckets:
            indices = [slot.index for slot in bucket.slots]
            results = self.reduce_bucket(bucket, [arrays[index] for index in indices])
            reduced.update(zip(indices, results, strict=True))
        return [reduced[index] for index in range(len(arrays))]

    def bound_to(self, bucket: Bucket) -> Callable[..., list[np.ndarray]]:
        """Returns `reduce_bucket` for one bucket, taking the arrays as its arguments."""
        return lambda *arrays: self.reduce_bucket(bucket, arrays)


def allreduce(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    op: ReduceOp,
    bucket_nbytes: int,
    key: str | None = None,
) -> list[np.ndarray]:
    """Reduces a list of arrays once. Collective: every rank; blocks.

    Args:
        comm: the ranks.
        arrays: this rank's arrays; shapes and dtypes must agree over the ranks.
        names: what they are called in messages.
        op: the reduction.
        bucket_nbytes: the size, in bytes, at which a bucket is closed.
        key: a name under which the ranks must meet; `None` for none.

    Returns:
        New arrays of the same shapes and dtypes, bit-equal on all ranks.

    Raises:
        MismatchError: the ranks differ.
        ArgumentTypeError: `op` is not defined for a dtype.
    """
    specs = [(array.shape, array.dtype) for array in arrays]
    if not arrays:
        meet(comm, Call("allreduce", op=op.value, key=key))
    return FusedAllreduce(comm, names, specs, op, bucket_nbytes, key=key)(arrays)


def _reduce_flat(comm: Communicator, flat: np.ndarray, op: ReduceOp) -> np.ndarray:
    """Reduces a flat array: each rank reduces its slice of all, then the slices are shared."""
    if comm.size == 1:
        return reduce_rows(flat[np.newaxis], op)
    if flat.nbytes <= SMALL_NBYTES:
        rows = np.empty((comm.size, flat.size), flat.dtype)
        comm.world.Allgather(_raw(flat), _raw(rows))
        return reduce_rows(rows, op)
    bounds = np.arange(comm.size + 1) * flat.size // comm.size
    counts = np.diff(bounds) * flat.itemsize
    starts = bounds[:-1] * flat.itemsize
    mine = int(bounds[comm.rank + 1] - bounds[comm.rank])
    rows = np.empty((comm.size, mine), flat.dtype)
    received = np.full(comm.size, rows[0].nbytes)
    comm.world.Alltoallv(
        [_raw(flat), counts, starts, comm.mpi.BYTE],
        [_raw(rows), received, np.arange(comm.size) * rows[0].nbytes, comm.mpi.BYTE],
    )
    result = np.empty_like(flat)
    comm.world.Allgatherv(
        _raw(reduce_rows(rows, op)), [_raw(result), counts, starts, comm.mpi.BYTE]
    )
    return result


def _raw(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of a contiguous array: MPI knows no bfloat16, but it knows bytes."""
    return array.reshape(-1).view(np.uint8)
