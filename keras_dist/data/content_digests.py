"""Digests of all files below a path, to detect later changes. Independent of caches.

Several threads read, as a disk is faster than one thread that hashes.
"""

import concurrent.futures
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

CHUNK_NBYTES = 1 << 20
THREADS = 8
DIRECTORY, LINK = "directory", "link to "

# Digest, or kind of another entry, by the path below the root; the root is ".".
Contents = dict[str, str]


def contents_of(
    root: Path,
    known: Mapping[Path, str] | None = None,
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> Contents:
    """Returns the contents at and below a path.

    Args:
        on_read: called with the number of bytes of each read, in several threads; an error that it
            raises ends the reading.
    """
    found: Contents = {}
    unread: list[Path] = []
    for path in _walk(root):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            found[_name(path, root)] = DIRECTORY
        elif stat.S_ISLNK(mode):
            found[_name(path, root)] = LINK + os.readlink(path)
        elif not stat.S_ISREG(mode):
            raise OSError(f"{path} is neither a file nor a directory")
        elif known is not None and path in known:
            found[_name(path, root)] = known[path]
        else:
            unread.append(path)

    def read(paths: list[Path]) -> Contents:
        return {_name(path, root): _digest(path, on_read) for path in paths}

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for digests in pool.map(read, [unread[n::THREADS] for n in range(THREADS)]):
            found |= digests
    return found


def find_others(root: Path) -> Path | None:
    """Returns a path, at or below a root, that belongs to another user, if there is one."""
    me = os.getuid()
    return next((path for path in _walk(root) if path.lstat().st_uid != me), None)


def size_of(root: Path) -> int:
    """Returns the size in bytes of all files at and below a path."""
    statuses = (path.lstat() for path in _walk(root))
    return sum(status.st_size for status in statuses if stat.S_ISREG(status.st_mode))


def _walk(root: Path) -> Iterator[Path]:
    """Yields a path and all paths below it, without following links."""
    yield root
    if not stat.S_ISDIR(root.lstat().st_mode):
        return
    for folder, directories, files in os.walk(root, onerror=_raise):
        for name in (*directories, *files):
            yield Path(folder, name)


def _raise(error: OSError) -> None:
    raise error


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _digest(path: Path, on_read: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_NBYTES):
            digest.update(chunk)
            on_read(len(chunk))
    return digest.hexdigest()
