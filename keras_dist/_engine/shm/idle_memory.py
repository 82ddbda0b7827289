"""Shared memory of gradients that are no longer reduced, as after layers have been frozen.

When the trainable variables of a model change, its gradients get a plan with memory of its own. A
plan that has been idle for `IDLE_UPDATES` releases its memory, and allocates new memory if it is
used again. Updates are counted after a rendezvous, so all ranks release the same memory at the same
update, without a message.
"""

import weakref
from typing import Protocol

IDLE_UPDATES = 100


class _Idle(Protocol):
    """A plan that holds shared memory."""

    def release(self) -> None:
        """Releases the memory until the plan is used again."""


class IdleMemory:
    """The plans of one communicator that hold memory, and their last use."""

    def __init__(self) -> None:
        # Least recently used first. A plan without other references frees its memory by itself.
        self._last_uses: weakref.WeakKeyDictionary[_Idle, int] = weakref.WeakKeyDictionary()
        self._updates = 0

    def used(self, plan: _Idle, is_update: bool = True) -> None:
        """Counts an update by a plan, and releases plans that have been idle for too long."""
        self._updates += is_update
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
