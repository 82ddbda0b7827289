"""The console belongs to the root: progress bars and messages of the others are silenced."""

from typing import Any

import keras

from keras_dist import runtime

__all__ = ["RootConsoleCallback"]


class RootConsoleCallback(keras.callbacks.Callback):
    """Lets only the root print, whatever `verbose` says on the other ranks.

    It must stand before Keras' own progress bar, which Keras appends to the list. On the
    other ranks Keras' interactive logging is switched off, so the messages of other
    callbacks and of a later `evaluate` are silent as well.

    Args:
        root_rank: the rank that prints. Defaults to 0.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank = root_rank

    def set_params(self, params: dict[str, Any]) -> None:
        """Sets `verbose` to 0 in the parameters, which all callbacks of the list share."""
        super().set_params(params)
        if runtime.rank() != self.root_rank:
            params["verbose"] = 0
            keras.utils.disable_interactive_logging()
