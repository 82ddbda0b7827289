"""SyncBatchNormalization with the argument that Horovod's has."""

from typing import Any

import keras

from keras_dist import errors, layers, runtime

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="keras_dist.tensorflow")
class SyncBatchNormalization(layers.SyncBatchNormalization):
    """Batch normalisation by all ranks' batches. See `keras_dist.layers.SyncBatchNormalization`.

    Args:
        fused: must be `False`.
        **kwargs: those of `keras.layers.BatchNormalization`.

    Raises:
        ArgumentError: `fused` is `True` or `None`.
    """

    def __init__(self, fused: bool = False, **kwargs: Any):
        if fused in (True, None):
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    "fused to be False",
                    repr(fused),
                    "A fused kernel sees the batch of one rank alone: leave fused out.",
                )
            )
        super().__init__(**kwargs)
