"""Owner and permissions of files and directories. Knows no ranks."""

import functools
import os
import pwd
import stat
from pathlib import Path

__all__ = [
    "describe",
    "find_unsafe",
    "is_private_directory",
    "private_name",
    "write_private",
]

OTHERS = stat.S_IRWXG | stat.S_IRWXO
ALL_USERS = 2**32 - 1
MAPPED = Path("/proc/self/uid_map")
UNMAPPED = Path("/proc/sys/kernel/overflowuid")


def private_name() -> str:
    """Returns what the directory of this user is called where others have theirs as well."""
    return f"keras_dist-{os.getuid()}"


def is_private_directory(path: Path) -> bool:
    """Tells whether this is a directory of this user, no link, to which nobody else has access."""
    try:
        found = path.lstat()  # not what a link of somebody else's leads to
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and _is_own(found) and not found.st_mode & OTHERS


def find_unsafe(path: Path) -> Path | None:
    """Returns the directory on the way to a path in which others can replace what lies there.

    A directory is safe that belongs to this user or to root, and that the others on the node cannot
    write to, unless its sticky bit is set. Members of its group are trusted.

    Args:
        path: a directory, without links; see `os.path.realpath`.
    """
    return next((place for place in (path, *path.parents) if not _is_safe(place.lstat())), None)


def describe(path: Path) -> str:
    """Returns whose a file or directory is, and its mode, for an error message."""
    found = path.lstat()
    return f"one of user {_name_of(found.st_uid)}, mode {stat.filemode(found.st_mode)}"


def write_private(path: Path, text: str) -> None:
    """Writes a new file that this user alone may read.

    Raises:
        FileExistsError: there is one, or a link.
        OSError: it cannot be written.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid()


def _is_safe(found: os.stat_result) -> bool:
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (os.getuid(), *_roots()) and not open_to_all


@functools.cache
def _roots() -> tuple[int, ...]:
    """Returns the users that are root: in a container the node's root has no number of its own."""
    try:
        counts = MAPPED.read_text().split()[2::3]  # lines of first inside, first outside, count
        return (0,) if sum(map(int, counts)) >= ALL_USERS else (0, int(UNMAPPED.read_text()))
    except OSError:  # no Linux
        return (0,)


def _name_of(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
