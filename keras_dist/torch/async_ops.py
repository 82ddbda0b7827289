"""Asynchronous collectives: each queues its operation and returns a handle immediately.

`synchronize(handle)` returns the result of the blocking form, without a gradient; see
`keras_dist.ops.asynchronous`. Functions whose names end in `_async_` operate in place.
"""

from keras_dist.ops.asynchronous import queued
from keras_dist.torch import sync_ops

allreduce_async = queued(sync_ops.allreduce)
allreduce_async_ = queued(sync_ops.allreduce_, "allreduce_async_")
grouped_allreduce_async = queued(sync_ops.grouped_allreduce)
grouped_allreduce_async_ = queued(sync_ops.grouped_allreduce_, "grouped_allreduce_async_")
sparse_allreduce_async = queued(sync_ops.sparse_allreduce)
reducescatter_async = queued(sync_ops.reducescatter)
grouped_reducescatter_async = queued(sync_ops.grouped_reducescatter)
allgather_async = queued(sync_ops.allgather)
grouped_allgather_async = queued(sync_ops.grouped_allgather)
alltoall_async = queued(sync_ops.alltoall)
broadcast_async = queued(sync_ops.broadcast)
broadcast_async_ = queued(sync_ops.broadcast_, "broadcast_async_")
