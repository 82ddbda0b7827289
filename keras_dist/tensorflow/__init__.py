"""keras_dist for loops written by hand in TensorFlow: tensors in, tensors out.

```python
import keras_dist.tensorflow as hvd

hvd.init()
```

Scripts written for `horovod.tensorflow` run with that import changed: the names, the arguments and
their order are the same. All functions work eagerly and inside a `tf.function`, where they are
operations that call the host: in the order of the program, which must be the same on all ranks.
Calls with a `name` that several threads of a rank make find each other in any order.
XLA cannot compile them, so a `tf.function(jit_compile=True)` cannot hold them.

What has a gradient is said at each function. Errors are those of keras_dist and, for scripts that
catch them, TensorFlow's: ranks that differ a `tf.errors.FailedPreconditionError`, wrong arguments a
`tf.errors.InvalidArgumentError`. Where a graph runs, TensorFlow makes its own of them, with the
same text: the latter of wrong arguments, `tf.errors.UnknownError` of ranks that differ.
"""

import sys

from keras_dist import _backends
from keras_dist import elastic as elastic
from keras_dist._backends import tensorflow as _own
from keras_dist.errors import LaunchError, explain
from keras_dist.monitor.timeline.control import start_timeline, stop_timeline
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

# So that it can be imported as Horovod's.
sys.modules[f"{__name__}.elastic"] = elastic

if _backends.active() is not _own:
    raise LaunchError(
        explain(
            "[keras_dist.tensorflow]",
            "the Keras backend to be tensorflow",
            _backends.active().__name__.rpartition(".")[2],  # type: ignore[attr-defined]
            "Set KERAS_BACKEND=tensorflow before Keras is imported.",
        )
    )
