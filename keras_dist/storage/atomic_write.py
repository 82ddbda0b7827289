"""Files that are there whole or not at all. Knows no ranks."""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator

__all__ = ["beside", "move"]


@contextlib.contextmanager
def beside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives an unguessable, hidden name beside the target; a file of it is gone afterwards."""
    path = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def move(path: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a file another name in its directory, when it is on disk, and puts that there too."""
    _flush(path)
    os.replace(path, target)
    _flush(target.parent)


def _flush(path: pathlib.Path) -> None:
    """Makes the system put a file, or the entries of a directory, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
