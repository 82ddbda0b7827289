"""Where the sockets of jobs lie, and how a job is read from one.

The root of a job listens on a Unix socket in a directory that is its user's alone, and, where it
was asked to, on a loopback port, for those who bring the token that lies beside the socket. Who
connects receives one line of JSON a second, until one of both has enough. Loads no engine.
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
    """Returns the directory of this user's sockets, after making it.

    It lies in `XDG_RUNTIME_DIR`, or in `/tmp` where that is not there.

    Raises:
        LaunchError: it belongs to somebody else, or others may write to it.
        OSError: it cannot be made.
    """
    path = _places()[0]
    path.mkdir(mode=0o700, exist_ok=True)
    if not is_private_directory(path):
        raise errors.LaunchError(
            errors.explain(
                "[keras_dist]",
                f"{path} to be a directory of this user's alone",
                describe(path),
                "Remove it, or set XDG_RUNTIME_DIR to a directory of your own.",
            )
        )
    return path


def find_sockets() -> list[Path]:
    """Returns the sockets of this user's jobs on this node, the newest first."""
    places = filter(is_private_directory, _places())
    found = [path for place in places for path in place.glob(f"*{SUFFIX}")]
    dated = []
    for path in found:
        with contextlib.suppress(OSError):  # a job that has ended meanwhile
            dated.append((path.lstat().st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]


def remove(path: Path) -> None:
    """Removes a socket, and the token beside it."""
    for found in (path, path.with_suffix(TOKEN_SUFFIX)):
        found.unlink(missing_ok=True)


def remove_dead() -> None:
    """Removes the sockets of this node's jobs whose root was killed: nobody listens to them."""
    for path in filter(is_of_this_node, find_sockets()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                remove(path)
            except OSError:  # it has ended by itself
                continue


def is_of_this_node(path: Path) -> bool:
    """Tells whether a socket is of a job here: others, in a directory of all nodes, refuse."""
    return path.name.startswith(f"{os.uname().nodename}-")


def jobs_of(path: Path) -> Iterator[Job]:
    """Yields a job as it is, once a second, as long as it lives.

    Raises:
        ConnectionRefusedError: nobody listens: its root was killed.
        OSError: it does not answer, or breaks off.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(str(path))
        yield from _read(connection)


def jobs_at(host: str, port: int, token: str) -> Iterator[Job]:
    """Yields a job that listens on a port, perhaps at the other end of a tunnel; see `jobs_of`.

    Raises:
        ArgumentError: what answers is no job, or refuses the token.
        OSError: nobody listens, or what does breaks off.
    """
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
                    errors.explain(
                        "[keras-dist top]",
                        "a job of keras_dist",
                        repr(line[:80].strip()),
                        "Check the address, and pass the token of that job.",
                    )
                ) from None


def _places() -> list[Path]:
    """Returns where the directory may lie, first where it does in this environment.

    Not first `TMPDIR`, which batch systems set for the job alone: who looks would look elsewhere.
    """
    places = []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):  # batch jobs inherit it from another node
        places.append(Path(runtime) / "keras_dist")
    for place in ("/tmp", tempfile.gettempdir()):
        if os.access(place, os.W_OK):
            places.append(Path(place) / private_name())
    return list(dict.fromkeys(places))
