"""The sockets of jobs: their directory, and the client that reads a job from one.

The root of a job listens on a Unix socket in a private directory of its user, and on request on a
loopback port, which requires the token in the directory of the socket. A client receives one line
of JSON per second until either side closes. Imports no engine.
"""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keras_dist import errors
from keras_dist.monitor.job import Job
from keras_dist.storage.ownership import describe, is_private_directory, private_name

__all__ = [
    "SUFFIX",
    "TOKEN_SUFFIX",
    "directory",
    "find_sockets",
    "is_of_this_node",
    "jobs_at",
    "jobs_of",
    "remove",
    "remove_dead",
]

SUFFIX, TOKEN_SUFFIX = ".socket", ".token"
ANSWER_SECONDS = 10.0  # a job answers within 3


def directory() -> Path:
    """Returns the directory of this user's sockets; creates it if needed.

    It lies in `XDG_RUNTIME_DIR`, or in `/tmp` without that.
    """
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
    candidates = filter(is_private_directory, _candidates())
    found = [path for folder in candidates for path in folder.glob(f"*{SUFFIX}")]
    dated = []
    for path in found:
        with contextlib.suppress(OSError):  # the job has ended
            dated.append((path.lstat().st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]


def remove(path: Path) -> None:
    """Removes a socket and its token."""
    for found in (path, path.with_suffix(TOKEN_SUFFIX)):
        found.unlink(missing_ok=True)


def remove_dead() -> None:
    """Removes sockets of this node without a listener, because the root was killed."""
    for path in filter(is_of_this_node, find_sockets()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                remove(path)
            except OSError:  # the job has just ended
                continue


def is_of_this_node(path: Path) -> bool:
    """Returns whether a socket belongs to this node; nodes may share the directory."""
    return path.name.startswith(f"{os.uname().nodename}-")


def jobs_of(path: Path) -> Iterator[Job]:
    """Yields the state of a job once per second, until the job ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(str(path))
        yield from _read(connection)


def jobs_at(host: str, port: int, token: str) -> Iterator[Job]:
    """Yields the state of a job that listens on a port, perhaps through a tunnel; see `jobs_of`."""
    with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(f"{token}\n".encode())
        yield from _read(connection)


def _read(connection: socket.socket) -> Iterator[Job]:
    with connection.makefile(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield Job.from_json(line)
            except ValueError:
                raise errors.ArgumentError(
                    "[keras-dist top]",
                    "a job of keras_dist",
                    repr(line[:80].strip()),
                    "Check the address, and pass the token of that job.",
                ) from None


def _candidates() -> list[Path]:
    """Returns the candidates for the directory, in order of preference.

    `TMPDIR` comes last: batch systems set it for the job only, so a viewer would look elsewhere.
    """
    candidates = []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):  # batch jobs inherit it from another node
        candidates.append(Path(runtime) / "keras_dist")
    for parent in ("/tmp", tempfile.gettempdir()):
        if os.access(parent, os.W_OK):
            candidates.append(Path(parent) / private_name())
    return list(dict.fromkeys(candidates))
