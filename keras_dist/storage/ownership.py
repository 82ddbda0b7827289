"""Owner and permissions of files and directories."""

import functools
import os
import pwd
import stat
from pathlib import Path

from keras_dist import errors

OTHERS = stat.S_IRWXG | stat.S_IRWXO
ALL_USERS = 2**32 - 1
MAPPED = Path("/proc/self/uid_map")
UNMAPPED = Path("/proc/sys/kernel/overflowuid")


def private_name() -> str:
    """Returns the name of this user's directory in a place shared with other users."""
    return f"keras_dist-{os.getuid()}"


def is_private_directory(path: Path) -> bool:
    """Returns whether a path is a directory, not a link, that only this user can access."""
    try:
        found = path.lstat()  # not the target of another user's link
    except OSError:
        return False
    is_own = found.st_uid == os.getuid()
    return stat.S_ISDIR(found.st_mode) and is_own and not found.st_mode & OTHERS


def make_private_directory(path: Path, where: str) -> None:
    """Creates a directory that only this user can access, if it does not exist."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private_directory(path):
        expected = f"{path} to be a directory that only this user can access"
        remedy = "Choose another directory, or run chmod 700 on it if it is yours."
        raise errors.ArgumentError(where, expected, describe(path), remedy)


def find_unsafe(path: Path) -> Path | None:
    """Returns the first directory of a path in which other users can replace entries, or `None`."""
    # A directory is safe if it belongs to this user or to root, and is not writable by all users or
    # has its sticky bit set. Members of its group are trusted.
    return next((each for each in (path, *path.parents) if not _is_safe(each.lstat())), None)


def describe(path: Path) -> str:
    """Returns owner and mode of a file or directory, for an error message."""
    found = path.lstat()
    return f"one of user {_name_of(found.st_uid)}, mode {stat.filemode(found.st_mode)}"


def write_private(path: Path, text: str) -> None:
    """Writes a new file that only this user may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _is_safe(found: os.stat_result) -> bool:
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (os.getuid(), *_roots()) and not open_to_all


@functools.cache
def _roots() -> tuple[int, ...]:
    """Returns the uids of root. In a user namespace the node's root is the overflow uid."""
    try:
        counts = MAPPED.read_text().split()[
            2::3
        ]  # lines: first uid inside, first uid outside, count
        return (0,) if sum(map(int, counts)) >= ALL_USERS else (0, int(UNMAPPED.read_text()))
    except OSError:  # not Linux
        return (0,)


def _name_of(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
