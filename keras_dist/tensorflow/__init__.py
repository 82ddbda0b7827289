"""Collectives on TensorFlow tensors, for custom training loops.

```python
import keras_dist.tensorflow as hvd

hvd.init()
```

Scripts written for `horovod.tensorflow` run with this import: the names, the arguments and their
order are the same. All functions work eagerly and in a `tf.function`, where they are operations
that call the host in program order, which must be the same on all ranks. Calls with a `name`, from
several threads of a rank, match by name in any order. XLA cannot compile the operations, so a
`tf.function(jit_compile=True)` cannot contain them.

Each function states its gradient. Errors are those of keras_dist and also TensorFlow's: a
`MismatchError` is a `tf.errors.FailedPreconditionError`, an `ArgumentError` a
`tf.errors.InvalidArgumentError`. When a graph runs, TensorFlow raises an error of its own with the
same text: `tf.errors.UnknownError` for a mismatch, `tf.errors.InvalidArgumentError` for arguments.
"""

import sys

from keras_dist import _backends
from keras_dist import elastic as elastic
from keras_dist._backends import tensorflow as _own
from keras_dist.errors import LaunchError
from keras_dist.monitor.timeline.recording import start_timeline, stop_timeline
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
from keras_dist.tensorflow.compressors import Compression, Compressor
from keras_dist.tensorflow.exchange_ops import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allgather,
)
from keras_dist.tensorflow.layers import SyncBatchNormalization
from keras_dist.tensorflow.object_ops import (
    allgather_object,
    barrier,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    join,
)
from keras_dist.tensorflow.optimizer import DistributedOptimizer
from keras_dist.tensorflow.ranks import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from keras_dist.tensorflow.reduce_ops import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from keras_dist.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

# For `import keras_dist.tensorflow.elastic`, as in scripts of Horovod.
sys.modules[f"{__name__}.elastic"] = elastic

if _backends.active() is not _own:
    raise LaunchError(
        "[keras_dist.tensorflow]",
        "the Keras backend to be tensorflow",
        _backends.active().__name__.rpartition(".")[2],  # type: ignore[attr-defined]
        "Set KERAS_BACKEND=tensorflow before Keras is imported.",
    )
