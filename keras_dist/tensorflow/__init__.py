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
from keras_dist._backends.tensorflow import backend as _own
from keras_dist.errors import LaunchError
from keras_dist.monitor.timeline.recording import start_timeline, stop_timeline
from keras_dist.ops import common
from keras_dist.ops.common import *  # noqa: F403
from keras_dist.ops.face import Compressor
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
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from keras_dist.tensorflow.reduce_ops import (
    Compression,
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from keras_dist.tensorflow.tape import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
)

__all__ = [
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
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
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
__all__ += common.__all__

# For `import keras_dist.tensorflow.elastic`, as in scripts of Horovod.
sys.modules[f"{__name__}.elastic"] = elastic

if _backends.active() is not _own:
    raise LaunchError(
        "[keras_dist.tensorflow]",
        "the Keras backend to be tensorflow",
        _backends.active().name,
        "Set KERAS_BACKEND=tensorflow before Keras is imported.",
    )
