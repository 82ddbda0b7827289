"""Processes of this node, watched for their end. Linux; independent of MPI."""

import contextlib
import os
import select
import threading
from collections.abc import Sequence


def namespace() -> str:
    """Returns the kernel's name of the process namespace; empty if it is unknown.

    In two namespaces one number may mean two processes.
    """
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


class Processes:
    """Processes, watched by file descriptors."""

    def __init__(self, pids: Sequence[int]):
        self._indices: dict[int, int] = {}
        self._dead: list[int] = []
        self._poll = select.poll()
        self._use = threading.Lock()  # a poll object serves one thread at a time
        for index, pid in enumerate(pids):
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.append(index)
            except (OSError, AttributeError):
                continue  # an old kernel, or one that forbids it: not watched
            else:
                self._indices[handle] = index
                self._poll.register(handle, select.POLLIN)

    def dead(self) -> list[int]:
        """Returns the indices of the processes that have ended, ascending."""
        with self._use:
            ended = self._poll.poll(0)
        return sorted(self._dead + [self._indices[handle] for handle, _ in ended])

    def __del__(self) -> None:
        for handle in self._indices:
            os.close(handle)
