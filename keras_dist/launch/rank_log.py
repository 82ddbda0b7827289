"""What a process prints, kept in a file. Knows no ranks."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

__all__ = ["printing_to"]


@contextlib.contextmanager
def printing_to(path: pathlib.Path) -> Iterator[None]:
    """Lets all that this process prints go to a file, also from below Python and from children.

    Args:
        path: a new file in place of what was there.
    """
    path.unlink(missing_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    _point(log, log)
    os.close(log)
    try:
        yield
    finally:
        _point(*kept)
        for descriptor in kept:
            os.close(descriptor)


def _point(out: int, error: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(error, 2)
