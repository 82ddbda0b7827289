"""The private directory of a user's jobs: their sockets, the token, and the client of both.

The root of a job serves at a Unix socket in this directory, and on request at a port, which needs
the token. The file of the token stays when the job ends, so that a scraper is configured once.
"""

import contextlib
import http.client
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from keras_dist import errors
from keras_dist.monitor.report import Job
from keras_dist.storage.atomic_write import beside
from keras_dist.storage.ownership import (
    describe,
    is_private_directory,
    private_name,
    write_private,
)

SUFFIX = ".socket"
ANSWER_SECONDS = 10.0  # a job answers within 3
PERIOD_SECONDS = 1.0
MIN_LENGTH, MAX_NBYTES = 16, 4096  # of a token, and of its file


def directory() -> Path:
    """Returns the directory of this user's sockets; creates it if needed."""
    path = _candidates()[0]
    path.mkdir(mode=0o700, exist_ok=True)
    if not is_private_directory(path):
        raise errors.LaunchError(
            "[keras_dist]",
            f"{path} to be a private directory of this user",
            describe(path),
            "Remove it, or set XDG_RUNTIME_DIR to a directory of your own.",
        )
    return path


def find_sockets() -> list[Path]:
    """Returns the sockets of this user's jobs, the newest first."""
    # Nodes may share the directory, and a container on this one may have a name of its own.
    candidates = filter(is_private_directory, _candidates())
    found = [path for folder in candidates for path in folder.glob(f"*{SUFFIX}")]
    dated = []
    for path in found:
        with contextlib.suppress(OSError):  # the job has ended
            dated.append((path.lstat().st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]


def remove_dead() -> None:
    """Removes sockets of this node without a listener, because the root was killed."""
    node = os.uname().nodename  # the name of another node may begin with it
    for path in (found for found in find_sockets() if found.name.rpartition("-")[0] == node):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # the job has just ended
                continue


def jobs_of(address: Path | tuple[str, int], token: str = "") -> Iterator[Job]:
    """Yields the state of a job at a socket, or at host and port, once per second until it ends."""
    end = time.monotonic()
    while True:
        try:
            job = _read(address, token)
        except (ConnectionResetError, BrokenPipeError, TimeoutError):
            if time.monotonic() > end:  # strangers may hold all connections of a port for a while
                raise
        else:
            yield job
            end = time.monotonic() + 2 * ANSWER_SECONDS
        time.sleep(PERIOD_SECONDS)


def _read(address: Path | tuple[str, int], token: str) -> Job:
    host, port = ("localhost", None) if isinstance(address, Path) else address
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    with contextlib.closing(connection):
        if isinstance(address, Path):
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(ANSWER_SECONDS)
            connection.sock.connect(str(address))
        try:
            connection.request("GET", "/job", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            if answer.status == http.HTTPStatus.OK:
                return Job.from_json(text)
            text = "the token is not that of this job" if answer.status == 401 else text
        except (http.client.HTTPException, ValueError) as error:
            if isinstance(error, OSError):
                raise
            text = str(error)
    raise errors.ArgumentError(
        "[keras-dist top]",
        "a job of keras_dist",
        repr(text[:80].strip()),
        "Check the address, and pass the token of that job.",
    )


def token_in(path: Path) -> str:
    """Returns the token in a private file; creates the file if there is none."""
    if not os.path.lexists(path):
        with beside(path) as made, contextlib.suppress(FileExistsError):
            write_private(made, f"{secrets.token_urlsafe(32)}\n")
            os.link(made, path)  # another job may have created it meanwhile
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


def _candidates() -> list[Path]:
    """Returns the candidates for the directory, in order of preference."""
    candidates = []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):  # batch jobs inherit it from another node
        candidates.append(Path(runtime) / "keras_dist")
    # `TMPDIR` comes last: batch systems set it for the job only, so a viewer would look elsewhere.
    for parent in ("/tmp", tempfile.gettempdir()):
        if os.access(parent, os.W_OK):
            candidates.append(Path(parent) / private_name())
    return list(dict.fromkeys(candidates))
