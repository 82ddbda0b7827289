"""Keras layers that synchronize over the ranks: `SyncBatchNormalization`."""

from typing import Any

import keras
from keras import ops

from keras_dist import _engine, runtime
from keras_dist._compat.keras.models import BatchNormalization
from keras_dist.training.rank_exchanges import reduce_over_ranks

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="keras_dist")
class SyncBatchNormalization(BatchNormalization):
    """Batch normalization by the mean and variance of the batches of all ranks.

    For small batches per rank. In training every unmasked sample has the same weight, on whichever
    rank it is; the moving statistics are equal on all ranks. On one rank, and at inference, the
    layer equals `keras.layers.BatchNormalization`.

    Collective: every rank of the job, whatever the process set of the optimizer, in each call with
    `training=True` and in the gradient of the call; blocks. All ranks must call the same layers in
    the same order.

    Each layer performs two reductions in the forward pass, for the mean and for the squared
    distances from it, and two in the backward pass. A single reduction of sums and squares would
    lose the digits of the variance if the mean is large.

    Args:
        **kwargs: arguments of `keras.layers.BatchNormalization`, except `synchronized`.

    Raises:
        MismatchError: the ranks call different layers or compute gradients of different layers;
            raised on every rank.

    Example:
    ```python
    model = keras.Sequential([
        keras.layers.Conv2D(32, 3),
        keras_dist.layers.SyncBatchNormalization(),
        keras.layers.ReLU(),
    ])
    ```
    """

    calls_host = True  # in training: XLA cannot compile a TensorFlow step with this layer

    def _keras_dist_moments(self, inputs: Any, mask: Any, axes: Any) -> tuple[Any, Any]:
        if runtime.size() == 1:
            return super()._keras_dist_moments(inputs, mask, axes)
        weights = ops.ones_like(inputs) if mask is None else ops.expand_dims(mask, -1)
        weights = ops.cast(ops.broadcast_to(weights, ops.shape(inputs)), inputs.dtype)
        inputs = ops.where(weights > 0, inputs, 0)  # masked samples may be NaN
        sums = [ops.sum(inputs, axes), ops.sum(weights, axes)]
        total, count = ops.split(self._sum_over_ranks(ops.concatenate(sums)), 2)
        if mask is not None:
            count = count + keras.config.epsilon()  # as in Keras: all samples may be masked
        mean = total / count
        # The gradient of the squares by the mean is 0, but not the second one.
        shape = [1] * len(inputs.shape)
        shape[self.axis] = -1
        distances = inputs - ops.reshape(mean, shape)
        squares = ops.sum(ops.square(distances) * weights, axes)
        return mean, self._sum_over_ranks(squares) / count

    def _sum_over_ranks(self, tensor: Any) -> Any:
        name = f"the statistics of {self.path}"
        return reduce_over_ranks(None, tensor, _engine.ReduceOp.SUM, name)
