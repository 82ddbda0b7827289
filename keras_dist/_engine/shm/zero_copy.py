"""Zero copy: results in shared memory that scripts read in place.

A lent result is an array with a base of its own. All views keep the base alive, and so do the
tensors that a framework makes of them: the base lives as long as the result may be read or written.

The mapping is copy-on-write: a write is private to this process. TensorFlow writes to a slice of a
gradient that nothing else reads. The kernel then copies page by page, which is slower than one
copy, so after a write nothing more is lent.

A forked child sees the memory of a lent result as well, and this process does not know how long it
reads it. So results of single calls that are held at a fork count as held for good.
"""

import os
import weakref
from collections.abc import Sequence

import numpy as np

from keras_dist._engine.shm.cow_mapping import CowMapping

_leases: "weakref.WeakSet[ResultLease]" = weakref.WeakSet()  # whose results a child may keep


class ResultLease:
    """Lends results, used in turn."""

    def __init__(self, views: Sequence[CowMapping], keeps_at_fork: bool = False):
        self._views = views
        self._is_over = False
        self._bases: list[weakref.ref[np.ndarray] | None] = [None] * len(views)
        self._kept: dict[int, np.ndarray] = {}
        if keeps_at_fork:
            _leases.add(self)

    def lend(self, turn: int, count: int, dtype: np.dtype) -> np.ndarray | None:
        """Returns a result; always `None` once a lent result has been written to.

        The result that was lent last in this turn must not be held any more.
        """
        view, nbytes = self._views[turn], count * dtype.itemsize
        self._is_over = self._is_over or view.is_written(nbytes)
        if self._is_over:
            return None
        base = np.frombuffer(view.memory, np.uint8, nbytes)
        self._bases[turn] = weakref.ref(base)
        return base.view(dtype)

    @property
    def held(self) -> int:
        """The turns whose result is still held, as bits."""
        turns = 0
        for turn, base in enumerate(self._bases):
            if base is not None:
                if base() is None:
                    self._bases[turn] = None
                else:
                    turns |= 1 << turn
        return turns

    def keep_held(self) -> None:
        """Keeps the results that are held now: they stay held."""
        for turn, reference in enumerate(self._bases):
            base = None if reference is None else reference()
            if base is not None:
                self._kept[turn] = base


def _before_fork() -> None:
    for lease in list(_leases):
        lease.keep_held()


os.register_at_fork(before=_before_fork)
