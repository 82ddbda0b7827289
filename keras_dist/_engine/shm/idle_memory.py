"""Shared memory of gradients that are not reduced any more, as of layers that have been frozen.

Whenever the trainable variables of a model change, its gradients get a plan of their own, with
memory of its own. A plan that has been idle for `IDLE_UPDATES` gives its memory back; it takes new
memory if it is used again. Updates are counted where all ranks have met, so all ranks give back the
same memory at the same update, and no rank has to tell the others.
"""

import weakref
from typing import Protocol

__all__ = ["IdleMemory"]

IDLE_UPDATES = 100


class _Plan(Protocol):
    """What holds shared memory."""

    def release(self) -> None:
        """Gives the memory back until the plan is used again."""


class IdleMemory:
    """The plans of one communicator that hold memory, and when each was last used."""

    def __init__(self) -> None:
        # Least recently used first. A plan that nobody else holds gives its memory back by itself.
        self._last_uses: weakref.WeakKeyDictionary[_Plan, int] = weakref.WeakKeyDictionary()
        self._updates = 0

    def used(self, plan: _Plan) -> None:
        """Notes an update by a plan and releases plans that have been idle for too long.

        Args:
            plan: the plan; all ranks have met for it and hold the lock of the communicator.
        """
        self._updates += 1
        self._last_uses.pop(plan, None)
        self._last_uses[plan] = self._updates
        for idle in list(self._last_uses):
            if self._updates - self._last_uses[idle] <= IDLE_UPDATES:
                break
            del self._last_uses[idle]
            idle.release()

    def clear(self) -> None:
        """Releases all plans."""
        for plan in list(self._last_uses):
            plan.release()
        self._last_uses.clear()
