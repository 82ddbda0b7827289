"""Reads the memory of another process: `process_vm_readv`, by ctypes. Linux.

The kernel allows it between processes of one user, unless a ptrace scope, the seccomp filter of a
container or separate user or process namespaces forbid it; so every pair of ranks tries it first.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["can_read_all", "read"]

MAX_PIECES = 1024  # the kernel's limit (UIO_MAXIOV) on pieces in one call

_libc = ctypes.CDLL(None, use_errno=True)
_readv: Any = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


def read(pid: int, here: np.ndarray, there: np.ndarray, nbytes: int) -> None:
    """Copies pieces of the memory of another process into that of this one.

    Args:
        pid: the other process.
        here: uint64 array of shape (pieces, 2): address and length of each piece here.
        there: the same in the other process.
        nbytes: the sum of the lengths, equal on both sides.

    Raises:
        OSError: the kernel refused, or did not copy everything.
    """
    copied = 0
    for first in range(0, len(here), MAX_PIECES):
        near, far = here[first : first + MAX_PIECES], there[first : first + MAX_PIECES]
        got = _readv(pid, near.ctypes.data, len(near), far.ctypes.data, len(far), 0)
        if got < 0:
            copied = got
            break
        copied += got
    if copied != nbytes:
        number = ctypes.get_errno() if copied < 0 else 0
        reason = os.strerror(number) if number else f"{copied} of {nbytes} bytes"
        raise OSError(number, f"reading the memory of process {pid}: {reason}")


def can_read_all(share: Callable[[Any], list[Any]]) -> bool:
    """Returns whether every rank of the node can read all others; the same on all ranks.

    Collective: every rank of the node.

    Args:
        share: returns the objects of all ranks of the node, in rank order.
    """
    secret = np.frombuffer(os.urandom(64), np.uint8)
    everyone = share((os.getpid(), secret.ctypes.data, secret.tobytes()))
    mine = _readv is not None and all(_can_read(*other) for other in everyone)
    return all(share(mine))  # keeps `secret` alive until all ranks have read it


def _can_read(pid: int, address: int, expected: bytes) -> bool:
    found = np.empty(len(expected), np.uint8)
    here = np.array([[found.ctypes.data, found.nbytes]], np.uint64)
    there = np.array([[address, found.nbytes]], np.uint64)
    try:
        read(pid, here, there, found.nbytes)
    except OSError:
        return False
    # In another container this number may be another process.
    return found.tobytes() == expected
