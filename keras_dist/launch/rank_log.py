"""Redirecting the output of a process to a file."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def printing_to(path: pathlib.Path) -> Iterator[None]:
    """Redirects the output of this process to a file, from C code and child processes as well."""
    path.unlink(missing_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    _redirect(log, log)
    os.close(log)
    try:
        yield
    finally:
        _redirect(*kept)
        for descriptor in kept:
            os.close(descriptor)


def _redirect(out: int, error: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(error, 2)
