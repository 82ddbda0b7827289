"""The directory of a user in a cache, and the locks on its entries."""

import fcntl
import os
from pathlib import Path

from keras_dist.storage.ownership import describe, find_unsafe, is_private_directory, private_name

USE = "use"  # the file of an entry that is locked

_held: dict[str, int] = {}  # descriptors with a lock, by entry; open until the process ends


class NotOwnError(PermissionError):
    """A path in the cache belongs to another user, or others may replace it.

    Args:
        received: its owner and mode.
    """

    def __init__(self, expected: str, received: str, remedy: str):
        super().__init__(f"{expected}: {received}")
        self.expected, self.received, self.remedy = expected, received, remedy


def own_directory(cache_dir: Path) -> Path:
    """Returns the directory of this user's entries, which no other user can write or replace."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    real = Path(os.path.realpath(cache_dir))  # a link may be replaced while it is used
    if (unsafe := find_unsafe(real)) is not None:
        raise NotOwnError(
            f"{unsafe} to belong to this user or root, and others not to write to it",
            describe(unsafe),
            "Pass a cache_dir whose contents other users cannot replace.",
        )
    own = real / private_name()
    own.mkdir(mode=0o700, exist_ok=True)
    if not is_private_directory(own):
        raise NotOwnError(
            f"{own} to be a directory of this user alone",
            describe(own),
            "Remove it, or pass another cache_dir.",
        )
    return own


def hold(path: Path) -> None:
    """Protects an entry from removal until this process ends."""
    entry = str(path.parent)
    if entry not in _held:
        _held[entry] = os.open(path.parent / USE, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(_held[entry], fcntl.LOCK_SH)


def is_held(entry: Path) -> bool:
    """Tells whether a process holds a lock on an entry."""
    try:
        with open(entry / USE) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
