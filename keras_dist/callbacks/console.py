"""Console output of the root only."""

from typing import Any

import keras

from keras_dist import runtime
from keras_dist.training.session_callback import SessionCallback


class RootConsoleCallback(SessionCallback):
    """Sets `verbose=0` on all ranks but the root.

    The callback must precede Keras' progress bar, which Keras appends to the list. On ranks other
    than the root Keras' interactive logging is disabled, which also silences other callbacks and
    later calls of `evaluate`.

    Args:
        root_rank: rank that prints. Defaults to 0.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank = root_rank

    def set_params(self, params: dict[str, Any]) -> None:
        """Sets `verbose` to 0 in the parameters, a dict that all callbacks share."""
        super().set_params(params)
        if runtime.rank() != self.root_rank:
            params["verbose"] = 0
            keras.utils.disable_interactive_logging()
