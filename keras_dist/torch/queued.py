"""The forms that do not block: each queues its operation and returns a handle at once.

See `keras_dist.asynchronous`: results are those of the blocking forms without gradients, and come
from `synchronize(handle)`. Forms whose names end in `_async_` write them into the tensors as well.
"""

from keras_dist.asynchronous import queued
from keras_dist.torch import plain

__all__ = [
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "reducescatter_async",
    "sparse_allreduce_async",
]

allreduce_async = queued(plain.allreduce)
allreduce_async_ = queued(plain.allreduce_, "allreduce_async_")
grouped_allreduce_async = queued(plain.grouped_allreduce)
grouped_allreduce_async_ = queued(plain.grouped_allreduce_, "grouped_allreduce_async_")
sparse_allreduce_async = queued(plain.sparse_allreduce)
reducescatter_async = queued(plain.reducescatter)
grouped_reducescatter_async = queued(plain.grouped_reducescatter)
allgather_async = queued(plain.allgather)
grouped_allgather_async = queued(plain.grouped_allgather)
alltoall_async = queued(plain.alltoall)
broadcast_async = queued(plain.broadcast)
broadcast_async_ = queued(plain.broadcast_, "broadcast_async_")
