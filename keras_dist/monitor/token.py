"""The access token of a job's endpoints, kept in a private file.

It stays when the job ends, so that what reads jobs again and again can be told of it once.
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

__all__ = ["fits", "new_token", "token_in"]

FEWEST_LETTERS = 16
MOST_NBYTES = 4096  # of a file that holds a token


def new_token() -> str:
    """Returns a token that nobody can guess."""
    return secrets.token_urlsafe(32)


def token_in(path: Path) -> str:
    """Returns the token in a file, which is made where there is none.

    Raises:
        LaunchError: the file is another user's, others may read it, or it holds no token.
        OSError: it cannot be read or made.
    """
    if not os.path.lexists(path):
        with beside(path) as made, contextlib.suppress(FileExistsError):
            write_private(made, f"{new_token()}\n")
            os.link(made, path)  # another job may have made one meanwhile
    return _read(path)


def fits(sent: str, token: str) -> bool:
    """Tells whether what was sent is the token; how long that takes tells nothing of it."""
    return hmac.compare_digest(sent.encode(errors="replace"), token.encode())


def _read(path: Path) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        alone = found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not stat.S_ISREG(found.st_mode) or not alone:
            raise _no_token(f"{path} to be a file that this user alone can read", describe(path))
        token = file.read(MOST_NBYTES).decode(errors="replace").strip()
    if len(token) < FEWEST_LETTERS or not token.isascii() or not token.isprintable():
        what = f"{path} to hold a token of {FEWEST_LETTERS} letters or more"
        raise _no_token(what, f"{len(token)} characters, or others than letters")
    return token


def _no_token(expected: str, received: str) -> errors.LaunchError:
    remedy = "Remove it: a new one is made. Or name another file."
    return errors.LaunchError(errors.explain("[keras_dist]", expected, received, remedy))
