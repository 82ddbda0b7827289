"""Private and undocumented names of Keras."""

from keras_dist._compat.keras import callbacks, models, optimizer_state, optimizers, seeds
from keras_dist._compat.keras.versions import version

__all__ = ["CONTRACT", "version"]

CONTRACT = (
    *optimizers.CONTRACT,
    *optimizer_state.CONTRACT,
    *models.CONTRACT,
    *seeds.CONTRACT,
    *callbacks.CONTRACT,
)
