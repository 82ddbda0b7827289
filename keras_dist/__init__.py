"""keras_dist: Keras training, written for one process, run synchronously on many.

```python
import keras_dist

keras_dist.init()
optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01 * keras_dist.size()))
model.compile(optimizer=optimizer, loss="mse")
model.fit(keras_dist.data.shard(dataset), callbacks=keras_dist.callbacks())
```

Names are imported when they are used, so that importing keras_dist costs no framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keras_dist import ending, launcher
from keras_dist._version import __version__

if TYPE_CHECKING:
    from keras_dist import callbacks, data, elastic, errors, layers, optimizers
    from keras_dist.asynchronous import (
        Handle,
        allgather_async,
        allreduce_async,
        alltoall_async,
        broadcast_async,
        grouped_allgather_async,
        grouped_allreduce_async,
        grouped_reducescatter_async,
        poll,
        reducescatter_async,
        sparse_allreduce_async,
        synchronize,
    )
    from keras_dist.builds import (
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
    from keras_dist.collectives import (
        allgather,
        allgather_object,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        broadcast_,
        broadcast_object,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        join,
        reducescatter,
        sparse_allreduce,
    )
    from keras_dist.compression import Compression, Compressor
    from keras_dist.interactive import run
    from keras_dist.optimizer import DistributedOptimizer, PartialDistributedOptimizer
    from keras_dist.pipeline import Pipeline
    from keras_dist.point_to_point import recv, send
    from keras_dist.process_sets import ProcessSet, global_process_set
    from keras_dist.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
    from keras_dist.replicas import verify_replicas
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
    from keras_dist.saving import load_model
    from keras_dist.timeline.control import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "Pipeline",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "elastic",
    "errors",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "layers",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "optimizers",
    "poll",
    "rank",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "send",
    "shutdown",
    "size",
    "sparse_allreduce",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "verify_replicas",
]

_ROOMS = {
    "asynchronous": (
        "Handle allgather_async allreduce_async alltoall_async broadcast_async "
        "grouped_allgather_async grouped_allreduce_async grouped_reducescatter_async poll "
        "reducescatter_async sparse_allreduce_async synchronize"
    ),
    "builds": (
        "ccl_built cuda_built ddl_built gloo_built gloo_enabled mpi_built mpi_enabled "
        "mpi_threads_supported nccl_built rocm_built"
    ),
    "collectives": (
        "allgather allgather_object allreduce alltoall barrier broadcast broadcast_ "
        "broadcast_object grouped_allgather grouped_allreduce grouped_reducescatter join "
        "reducescatter sparse_allreduce"
    ),
    "compression": "Compression Compressor",
    "interactive": "run",
    "optimizer": "DistributedOptimizer PartialDistributedOptimizer",
    "pipeline": "Pipeline",
    "point_to_point": "recv send",
    "process_sets": "ProcessSet global_process_set",
    "reduce_op": "Adasum Average Max Min Product ReduceOp Sum",
    "replicas": "verify_replicas",
    "runtime": (
        "add_process_set cross_rank cross_size init is_homogeneous is_initialized local_rank "
        "local_size rank remove_process_set shutdown size"
    ),
    "saving": "load_model",
    "timeline.control": "start_timeline stop_timeline",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}

# Under a launcher two things cannot wait until keras_dist is used.
launcher.limit_threads()
if launcher.starts_ranks():
    ending.watch()


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        value = getattr(importlib.import_module(f"keras_dist.{_ROOM_OF[name]}"), name)
    elif name in __all__:
        value = importlib.import_module(f"keras_dist.{name}")
    else:
        raise AttributeError(f"module 'keras_dist' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
