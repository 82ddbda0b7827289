"""Collectives on values, for scripts: numpy arrays in, numpy arrays out.

Arguments are whatever numpy can convert to an array (numbers, lists, arrays, eager tensors on the
CPU); results are new numpy arrays. All ranks must call the same operations in the same order; a
mismatch is an error on every rank. Operations with a `name` that several threads of a rank issue
may come in any order: operations match by name. With a `process_set` all of this holds for the
ranks of the set: only they take part and count, and results are in their order.
"""

from keras_dist.ops.exchanges import (
    allgather,
    allgather_object,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    grouped_allgather,
    join,
)
from keras_dist.ops.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
    sparse_allreduce,
)

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
    "sparse_allreduce",
]
