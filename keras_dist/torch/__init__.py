"""Collectives on torch tensors, for custom training loops. Does not import Keras.

```python
import keras_dist.torch as hvd

hvd.init()
torch.cuda.set_device(hvd.local_rank())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
```

Scripts written for `horovod.torch` run with this import: the names, the arguments and their order
are the same. Queued operations with a `name` match by name, in any order. Other operations must be
called in the same order on all ranks.

GPU tensors are staged in pinned host memory.
"""

import sys

from keras_dist import _backends
from keras_dist import elastic as elastic
from keras_dist.elastic.running import HorovodInternalError
from keras_dist.elastic.torch_sampler import ElasticSampler
from keras_dist.monitor.timeline.recording import start_timeline, stop_timeline
from keras_dist.ops import barrier, common
from keras_dist.ops.asynchronous import Handle, poll, synchronize
from keras_dist.ops.common import *  # noqa: F403
from keras_dist.ops.face import Compressor
from keras_dist.torch.async_ops import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    reducescatter_async,
    sparse_allreduce_async,
)
from keras_dist.torch.broadcasts import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    join,
)
from keras_dist.torch.distributed_optimizer import DistributedOptimizer
from keras_dist.torch.exchange_ops import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from keras_dist.torch.layers import SyncBatchNorm
from keras_dist.torch.reduce_ops import (
    Compression,
    allreduce,
    allreduce_,
    grouped_allreduce,
    grouped_allreduce_,
)

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "ElasticSampler",
    "Handle",
    "HorovodInternalError",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
__all__ += common.__all__

# For `import keras_dist.torch.elastic`, as in scripts of Horovod.
sys.modules[f"{__name__}.elastic"] = elastic

# `init` then pins torch's device and sets the size of its thread pool.
_backends.use("torch")
