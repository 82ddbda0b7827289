"""Zero copy: results in shared memory that scripts read in place.

A lent result is an array with a base of its own. All views keep the base alive, and so do the
tensors that a framework makes of them: the base lives as long as the result may be read or written.

The mapping is copy-on-write: a write is private to this process. TensorFlow writes to a slice of a
gradient that nothing else reads. The kernel then copies page by page, which is slower than one
copy, so after a write nothing more is lent.
"""

import weakref
from collections.abc import Sequence

import numpy as np

from keras_dist._engine.shm.cow_mapping import CowMapping

__all__ = ["ResultLease"]


class ResultLease:
    """Lends the results of one bucket, used in turn.

    Args:
        views: the memory of each result.
        dtype: dtype of the results.
    """

    def __init__(self, views: Sequence[CowMapping], dtype: np.dtype):
        self._views, self._dtype = views, dtype
        self._is_over = False
        self._bases: list[weakref.ref[np.ndarray] | None] = [None] * len(views)

    def lend(self, turn: int) -> np.ndarray | None:
        """Returns a result; always `None` once a lent result has been written to.

        The result that was lent last in this turn must not be held any more.
        """
        view = self._views[turn]
        self._is_over = self._is_over or view.is_written()
        if self._is_over:
            return None
        base = np.frombuffer(view.memory, np.uint8)
        self._bases[turn] = weakref.ref(base)
        return base.view(self._dtype)

    def is_held(self, turn: int) -> bool:
        """Returns whether the result that was lent last in a turn is still held."""
        base = self._bases[turn]
        return base is not None and base() is not None
