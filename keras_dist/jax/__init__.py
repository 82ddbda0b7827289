"""Collectives on JAX arrays, for custom training loops. Does not import Keras.

```python
import keras_dist.jax as hvd

hvd.init()
weights = hvd.broadcast_parameters(weights)

@jax.jit
def step(weights, batch):
    gradients = hvd.pmean(jax.grad(loss_of)(weights, batch))
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)
```

All functions work inside and outside `jax.jit`. Arrays are read in place; inside, results are
copied, and on GPUs arrays as well. The order of the calls must be the same on every rank. A call
outside waits for the programs that were started before it.

As elsewhere in JAX, 64-bit arrays become 32-bit without `jax_enable_x64`. Calls of the host support
neither forward-mode differentiation nor `vmap` nor `jax.checkpoint`, so collectives do not either:
`jax.grad`, also of a gradient, `jax.vjp`, `jax.lax.scan` and `jax.lax.cond` work; `jax.jvp`,
`jax.jacrev` and `jax.hessian` do not. In a program of several devices, as `jax.shard_map` makes it,
each device would make the call, so it is an error: call the collective on the results.
"""

from keras_dist import _backends
from keras_dist.jax.exchange_ops import (
    allgather,
    alltoall,
    broadcast,
    broadcast_parameters,
    grouped_allgather,
)
from keras_dist.jax.reduce_ops import (
    allreduce,
    average_gradients,
    grouped_allreduce,
    grouped_reducescatter,
    pmean,
    psum,
    reducescatter,
)
from keras_dist.monitor.timeline.recording import start_timeline, stop_timeline
from keras_dist.ops import allgather_object, barrier, broadcast_object, common, join
from keras_dist.ops.common import *  # noqa: F403
from keras_dist.ops.reduce_op import Compression, Compressor

__all__ = [
    "Compression",
    "Compressor",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "pmean",
    "psum",
    "reducescatter",
    "start_timeline",
    "stop_timeline",
]
__all__ += common.__all__

# `init` pins its device and sizes its thread pool.
_backends.use("jax")
