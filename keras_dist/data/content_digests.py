"""What lies below a path: for each file its digest, so that it can be told later whether it is so.

Knows no cache. Several threads read, as a disk of a node is quicker than one that hashes.
"""

import concurrent.futures
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ["Contents", "contents_of", "find_others", "size_of"]

CHUNK_NBYTES = 1 << 20
THREADS = 8
DIRECTORY, LINK = "directory", "link to "

# By the path below the root, that of the root being ".": a digest, or what else lies there.
Contents = dict[str, str]


def contents_of(
    root: Path,
    known: Mapping[Path, str] | None = None,
    went_on: Callable[[int], None] = lambda nbytes: None,
) -> Contents:
    """Returns what lies at and below a path.

    Args:
        root: a file or a directory.
        known: SHA-256 digests of files that need not be read for theirs. Defaults to none.
        went_on: called with the number of bytes that have been read since, in several threads; what
            it raises ends the reading.

    Raises:
        OSError: a file cannot be read, or is no file, directory or link.
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

    def read(share: list[Path]) -> Contents:
        return {_name(path, root): _digest(path, went_on) for path in share}

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for some in pool.map(read, [unread[place::THREADS] for place in range(THREADS)]):
            found |= some
    return found


def find_others(root: Path) -> Path | None:
    """Returns what of all that lies at and below a path is another user's; `None`: nothing."""
    me = os.getuid()
    return next((path for path in _walk(root) if path.lstat().st_uid != me), None)


def size_of(root: Path) -> int:
    """Returns the bytes of all files at and below a path."""
    found = (path.lstat() for path in _walk(root))
    return sum(one.st_size for one in found if stat.S_ISREG(one.st_mode))


def _walk(root: Path) -> Iterator[Path]:
    """Yields the path and all below it; follows no links."""
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


def _digest(path: Path, went_on: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_NBYTES):
            digest.update(chunk)
            went_on(len(chunk))
    return digest.hexdigest()
