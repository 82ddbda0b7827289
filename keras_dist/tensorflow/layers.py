"""`SyncBatchNormalization` with the argument of Horovod's."""

from typing import Any

import keras

from keras_dist import errors, layers, runtime


@keras.saving.register_keras_serializable(package="keras_dist.tensorflow")
class SyncBatchNormalization(layers.SyncBatchNormalization):
    """Batch normalisation over the batches of all ranks.

    See `keras_dist.layers.SyncBatchNormalization`.

    Args:
        fused: must be `False`.
        **kwargs: arguments of `keras.layers.BatchNormalization`.

    Raises:
        ArgumentError: `fused` is `True` or `None`.
    """

    def __init__(self, fused: bool = False, **kwargs: Any):
        if fused in (True, None):
            raise errors.ArgumentError(
                runtime.where(),
                "fused to be False",
                repr(fused),
                "Omit fused: a fused kernel sees only the batch of its rank.",
            )
        super().__init__(**kwargs)
