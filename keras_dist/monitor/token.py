"""The access token of a job's endpoints, kept in a private file.

The file stays when the job ends, so that a scraper is configured once.
"""

import contextlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from keras_dist import errors
from keras_dist.storage.atomic_write import beside
from keras_dist.storage.ownership import describe, write_private

MIN_LENGTH = 16
MAX_NBYTES = 4096


def new_token() -> str:
    """Returns a new random token."""
    return secrets.token_urlsafe(32)


def token_in(path: Path) -> str:
    """Returns the token in a file; creates the file if there is none."""
    if not os.path.lexists(path):
        with beside(path) as made, contextlib.suppress(FileExistsError):
            write_private(made, f"{new_token()}\n")
            os.link(made, path)  # another job may have created it meanwhile
    return _read(path)


def fits(sent: str, token: str) -> bool:
    """Tells whether a sent text equals the token, in constant time."""
    return hmac.compare_digest(sent.encode(errors="replace"), token.encode())


def _read(path: Path) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        alone = found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not stat.S_ISREG(found.st_mode) or not alone:
            raise _no_token(f"{path} to be a file that only this user can read", describe(path))
        token = file.read(MAX_NBYTES).decode(errors="replace").strip()
    if len(token) < MIN_LENGTH or not token.isascii() or not token.isprintable():
        what = f"{path} to hold a token of at least {MIN_LENGTH} ASCII characters"
        raise _no_token(what, f"{len(token)} characters, or others than printable ASCII")
    return token


def _no_token(expected: str, received: str) -> errors.LaunchError:
    remedy = "Remove the file, so that a new token is created, or name another file."
    return errors.LaunchError("[keras_dist]", expected, received, remedy)
