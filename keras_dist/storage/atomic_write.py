"""Atomic file writes."""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator


@contextlib.contextmanager
def beside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a hidden temporary file beside the target; removes the file at the end."""
    path = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def move(path: pathlib.Path, target: pathlib.Path) -> None:
    """Renames a file within its directory; flushes the file before and the directory after."""
    _flush(path)
    os.replace(path, target)
    _flush(target.parent)


def _flush(path: pathlib.Path) -> None:
    """Flushes a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
