"""Asynchronous collectives: each queues its operation and returns a handle immediately.

`synchronize(handle)` returns the result of the blocking form, without a gradient; see
`keras_dist.ops.asynchronous`. Functions whose names end in `_async_` operate in place.
"""

from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from keras_dist.ops import asynchronous
from keras_dist.ops.asynchronous import Handle
from keras_dist.torch import exchange_ops, reduce_ops
from keras_dist.torch.compilation import untraced

P = ParamSpec("P")


def queued(
    operation: Callable[P, Any], name: str | None = None, **fixed: Any
) -> Callable[P, Handle]:
    """Returns the queued form of an operation; see `keras_dist.ops.asynchronous.queued`."""
    return untraced(asynchronous.queued(torch.no_grad()(operation), name, **fixed))


# As in Horovod, those that take a compression when they block have no such argument here, so their
# static type does not name the others either.
allreduce_async: Callable[..., Handle] = queued(reduce_ops.allreduce, compression=None)
allreduce_async_ = queued(reduce_ops.allreduce_, "allreduce_async_")
grouped_allreduce_async: Callable[..., Handle] = queued(
    reduce_ops.grouped_allreduce, compression=None
)
grouped_allreduce_async_ = queued(reduce_ops.grouped_allreduce_, "grouped_allreduce_async_")
sparse_allreduce_async = queued(reduce_ops.sparse_allreduce)
reducescatter_async: Callable[..., Handle] = queued(exchange_ops.reducescatter, compression=None)
grouped_reducescatter_async: Callable[..., Handle] = queued(
    exchange_ops.grouped_reducescatter, compression=None
)
allgather_async = queued(exchange_ops.allgather)
grouped_allgather_async = queued(exchange_ops.grouped_allgather)
alltoall_async = queued(exchange_ops.alltoall)
broadcast_async = queued(exchange_ops.broadcast)
broadcast_async_ = queued(exchange_ops.broadcast_, "broadcast_async_")
