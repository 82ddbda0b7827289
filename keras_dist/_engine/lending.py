"""Results that lie in shared memory, and whether whom they were lent to still holds them.

What is lent is an array with a base of its own. All views of it hold the base, and so do the
tensors that a framework makes of them, so it lives as long as somebody may read the result.
"""

import weakref

import numpy as np

__all__ = ["Lending"]


class Lending:
    """The results of one bucket, used in turn.

    Args:
        results: where they lie.
    """

    def __init__(self, results: list[np.ndarray]):
        self._results = results
        self._bases: list[weakref.ref[np.ndarray] | None] = [None] * len(results)

    def lend(self, turn: int) -> np.ndarray:
        """Returns a result, to be read in place."""
        result = self._results[turn]
        base = np.frombuffer(result.view(np.uint8).data, np.uint8)
        self._bases[turn] = weakref.ref(base)
        return base.view(result.dtype)

    def is_held(self, turn: int) -> bool:
        """Tells whether somebody may still read what was lent last of a turn."""
        base = self._bases[turn]
        return base is not None and base() is not None
