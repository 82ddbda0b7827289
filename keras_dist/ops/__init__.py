"""Collectives on values: what a script calls by hand. numpy in, numpy out.

Each takes whatever numpy can make an array of (numbers, lists, arrays, eager tensors on the
CPU) and gives new numpy arrays. Every rank must call the same operations in the same order;
a difference is an error on every rank. Calls with a `name` that several threads of a rank make may
come in any order: ranks find each other's by it. With a `process_set` all of this holds for the
ranks of the set: they alone call, they alone are counted, and results are in their order.
"""

from keras_dist.ops.exchanges import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
)
from keras_dist.ops.joining import join
from keras_dist.ops.objects import allgather_object, broadcast_object
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
