"""Results that lie in shared memory and are read there, and whether somebody still holds them.

What is lent is an array with a base of its own. All views hold the base, and so do the tensors that
a framework makes of them, so it lives as long as somebody may read the result, or write to it.

It is seen through a window, so that whoever writes to it changes what he has, and nobody else's:
TensorFlow does so to a slice of a gradient that nobody else reads. The kernel copies each page of
that, which takes longer than to copy all at once; so there nothing is lent any more.
"""

import weakref
from collections.abc import Sequence

import numpy as np

from keras_dist._engine.shm.cow_mapping import CowMapping

__all__ = ["ResultLease"]


class ResultLease:
    """The results of one bucket, used in turn.

    Args:
        windows: the memory of each.
        dtype: theirs.
    """

    def __init__(self, windows: Sequence[CowMapping], dtype: np.dtype):
        self._windows, self._dtype = windows, dtype
        self._is_over = False
        self._bases: list[weakref.ref[np.ndarray] | None] = [None] * len(windows)

    def lend(self, turn: int) -> np.ndarray | None:
        """Returns a result; `None` for ever once what was lent has been written to.

        Nobody may hold what was lent last of this turn.
        """
        window = self._windows[turn]
        self._is_over = self._is_over or window.is_written()
        if self._is_over:
            return None
        base = np.frombuffer(window.memory, np.uint8)
        self._bases[turn] = weakref.ref(base)
        return base.view(self._dtype)

    def is_held(self, turn: int) -> bool:
        """Tells whether somebody still holds what was lent last of a turn."""
        base = self._bases[turn]
        return base is not None and base() is not None
