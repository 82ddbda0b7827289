"""Private and undocumented names of Keras."""

from keras_dist._compat.keras import (
    callbacks,
    losses,
    metrics,
    models,
    optimizer_state,
    optimizers,
    seeds,
    sliced_updates,
)
from keras_dist._compat.keras.versions import version

__all__ = ["CONTRACT", "version"]

CONTRACT = (
    *optimizers.CONTRACT,
    *optimizer_state.CONTRACT,
    *sliced_updates.CONTRACT,
    *losses.CONTRACT,
    *models.CONTRACT,
    *metrics.CONTRACT,
    *seeds.CONTRACT,
    *callbacks.CONTRACT,
)
