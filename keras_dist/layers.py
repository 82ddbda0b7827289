"""Layers that look at the data of all ranks: `SyncBatchNormalization`.

Each is one layer for all backends. What a backend adds is a sum over the ranks that has a
gradient.
"""

from typing import Any

import keras
from keras import ops

from keras_dist import runtime
from keras_dist._compat.keras.models import BatchNormalization
from keras_dist.training.gradient_reduction import sum_over_ranks

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="keras_dist")
class SyncBatchNormalization(BatchNormalization):
    """Batch normalisation by the mean and variance of all ranks' batches together.

    For batches that are small on each rank. In training a sample counts the same whichever rank
    has it, and samples that are masked do not count. The moving statistics are equal on all
    ranks. On one rank, and when it does not train, it is `keras.layers.BatchNormalization`.

    Collective: every rank of the job, whatever the process set of the optimizer, in each call in
    training and in the gradient of each; all must call the same layers in the same order; blocks.

    Each layer meets the other ranks twice in a step forwards and twice backwards: for the mean,
    and for the squared distances from it. Their sum would be had together with that of the
    values, but the variance as their difference loses its digits when the mean is large.

    Args:
        **kwargs: those of `keras.layers.BatchNormalization`; `synchronized` stays `False`.

    Raises:
        MismatchError: the ranks call different layers or the gradients of different ones;
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

    calls_host = True  # in training, so XLA cannot compile a step of TensorFlow with it

    def _keras_dist_moments(self, inputs: Any, mask: Any, axes: Any) -> tuple[Any, Any]:
        if runtime.size() == 1:
            return super()._keras_dist_moments(inputs, mask, axes)
        weights = ops.ones_like(inputs) if mask is None else ops.expand_dims(mask, -1)
        weights = ops.cast(ops.broadcast_to(weights, ops.shape(inputs)), inputs.dtype)
        inputs = ops.where(weights > 0, inputs, 0)  # what is masked may be NaN
        sums = [ops.sum(inputs, axes), ops.sum(weights, axes)]
        total, count = ops.split(self._sum_over_ranks(ops.concatenate(sums)), 2)
        if mask is not None:
            count = count + keras.config.epsilon()  # as Keras: all may be masked
        mean = total / count
        # Of the mean the squared distances are the minimum, so it has no part in their gradient.
        shape = [1] * len(inputs.shape)
        shape[self.axis] = -1
        distances = inputs - ops.reshape(ops.stop_gradient(mean), shape)
        squares = ops.sum(ops.square(distances) * weights, axes)
        return mean, self._sum_over_ranks(squares) / count

    def _sum_over_ranks(self, tensor: Any) -> Any:
        name = f"the statistics of {self.path}"
        return sum_over_ranks(None, tensor, name)
