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
from keras_dist.ops import barrier
from keras_dist.ops.asynchronous import Handle, poll, synchronize
from keras_dist.ops.reduce_op import Adasum, Average, Max, Min, Product, Sum
from keras_dist.runtime import (
    add_process_set,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from keras_dist.runtime.build_info import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
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
from keras_dist.torch.compressors import Compression, Compressor
from keras_dist.torch.exchange_ops import allgather, alltoall, broadcast, grouped_allgather
from keras_dist.torch.layers import SyncBatchNorm
from keras_dist.torch.optimizer import DistributedOptimizer
from keras_dist.torch.reduce_ops import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from keras_dist.torch.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    join,
)
from keras_dist.torch.sync_ops import allreduce_, broadcast_, grouped_allreduce_

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "ElasticSampler",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

# For `import keras_dist.torch.elastic`, as in scripts of Horovod.
sys.modules[f"{__name__}.elastic"] = elastic

# `init` then pins torch's device and sets the size of its thread pool.
_backends.use("torch")
