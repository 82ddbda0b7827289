"""Processes of this node that may die while others wait for them. Linux; knows no MPI."""

import contextlib
import os
import select
import threading
from collections.abc import Sequence

__all__ = ["Processes", "namespace"]


def namespace() -> str:
    """Returns a name of the numbers by which this process knows others, as the kernel has it.

    In two containers one number may mean two processes. Empty where it is not known.
    """
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


class Processes:
    """Some processes, watched by file descriptors that tell when one has ended.

    Args:
        pids: their numbers, in the namespace of this process.
    """

    def __init__(self, pids: Sequence[int]):
        self._places: dict[int, int] = {}
        self._dead: list[int] = []
        self._poll = select.poll()
        self._use = threading.Lock()  # a poll object serves one thread at a time
        for place, pid in enumerate(pids):
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.append(place)
            except (OSError, AttributeError):
                continue  # an old kernel, or one that forbids it: who knows
            else:
                self._places[handle] = place
                self._poll.register(handle, select.POLLIN)

    def dead(self) -> list[int]:
        """Returns which of them have ended: their places in the list, ascending."""
        with self._use:
            ended = self._poll.poll(0)
        return sorted(self._dead + [self._places[handle] for handle, _ in ended])

    def __del__(self) -> None:
        for handle in self._places:
            os.close(handle)
