"""The program by which mpiexec of Open MPI enters a host: ssh, and a note of how it ends.

mpiexec may wait forever for a host that is lost, as ssh does; that of Open MPI may also end with
exit code 0. With this program ssh notices a host that does not answer, and `keras-dist run` is
told. mpiexec of MPICH fails if ssh does, so that options of ssh suffice. Imports no MPI.
"""

import argparse
import contextlib
import itertools
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from keras_dist import errors
from keras_dist.launch.cli.job_process import GRACE_SECONDS, end_with_parent
from keras_dist.launch.cli.mpiexec import Library

MAX_UNANSWERED = 4  # messages to a host
POLL_SECONDS = 0.05  # between looks whether connections have ended
RUNS = "runs"  # the note of a connection that has not ended
SSH_FAILED = 255  # exit code of ssh for errors of its own, such as a host that does not answer


def agent_command(ssh: str, notes: Path, limit: int) -> list[str]:
    """Returns the command of this program, to be followed by a host and a command there."""
    module = [sys.executable, "-P", "-m", "keras_dist.launch.remote_shell"]
    # mpiexec drops a last word without a dash.
    return [*module, f"--ssh={ssh}", f"--notes={notes}", f"--limit={limit}"]


def read_notes(notes: Path) -> dict[str, int | None]:
    """Returns the hosts that were entered, and the exit code of ssh for each; `None`: it runs."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    # A disk that is full may have cut a line.
    found = [words for words in map(str.split, lines) if len(words) == 2]
    return {host: int(code) if code.lstrip("-").isdecimal() else None for host, code in found}


def main() -> int:
    """Runs ssh, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m keras_dist.launch.remote_shell")
    parser.add_argument("--ssh", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("host")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    _note(options, RUNS)
    # As a master of connections, ssh would live until the last of other jobs and of the user ends.
    alone = ["-o", "ControlMaster=no"]
    settings = [*alone, *_alive_options(options.limit)]
    words = [options.ssh, "-x", *settings, options.host, *options.command]
    code = subprocess.call(words, preexec_fn=end_with_parent)
    _note(options, str(code))
    return code if code >= 0 else 128 - code  # the convention of shells


def _note(options: argparse.Namespace, what: str) -> None:
    # Where mpiexec enters many hosts, some of them enter others, without the folder.
    with contextlib.suppress(OSError), options.notes.open("a") as notes:
        notes.write(f"{options.host} {what}\n")


def _alive_options(limit: int) -> list[str]:
    """Returns the options with which ssh ends if a host does not answer for some seconds."""
    interval = max(1, limit // (MAX_UNANSWERED + 1))
    options = f"ServerAliveInterval={interval}", f"ServerAliveCountMax={MAX_UNANSWERED}"
    return [word for option in options for word in ("-o", option)] if limit else []


class Connections:
    """The connections of one start of a job.

    A host is lost after `limit` seconds of silence; 0: never.
    """

    def __init__(self, notes: Path, limit: int, variables: dict[str, str]):
        self._notes, self._limit, self.variables = notes, limit, variables
        self._has_succeeded = False

    def close(self) -> None:
        """Removes the notes."""
        self._notes.unlink(missing_ok=True)

    def lost(self, has_succeeded: bool = False) -> str:
        """Returns an error that names the hosts that are lost; empty if there are none.

        mpiexec also reports success when the daemon of a host is gone, before ssh notices, and
        kills this program. After a real success each connection ends at once, without an error.
        """
        notes = read_notes(self._notes)
        if has_succeeded:
            self._has_succeeded = True
            end = time.monotonic() + GRACE_SECONDS
            while None in notes.values() and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                notes = read_notes(self._notes)
        found = {host: code for host, code in notes.items() if self._is_broken(code)}
        if not found:
            return ""
        told = ", ".join(
            f"no end of ssh to {host}" if code is None else f"exit code {code} of ssh to {host}"
            for host, code in found.items()
        )
        patience = ""
        if self._limit:
            patience = (
                f" A host is lost after {self._limit} s without an answer "
                "(KERAS_DIST_STALL_ABORT_SECONDS)."
            )
        return errors.explain(
            "[keras-dist run]",
            f"{' and '.join(found)} to answer until the job ends",
            told,
            f"Check the host and its network.{patience}",
        )

    def _is_broken(self, code: int | None) -> bool:
        # Another code is that of the daemon, which tells of ranks.
        return self._has_succeeded if code is None else code < 0 or code == SSH_FAILED


def _variables(library: Library, ssh: str, notes: Path, limit: int) -> dict[str, str]:
    if library.vendor == "MPICH" and limit:
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(_alive_options(limit))}
    words = agent_command(ssh, notes, limit)
    # PRRTE divides a command at its blanks.
    is_usable = library.survives_rank_loss and shlex.join(words) == " ".join(words)
    return {"PRTE_MCA_plm_ssh_agent": " ".join(words)} if is_usable else {}


@contextlib.contextmanager
def watched_connections(
    library: Library, ssh: str | None, limit: int
) -> Iterator[Callable[[], Connections]]:
    """Watches the connections of jobs while mpiexec enters hosts by ssh.

    Yields a function that returns those of a further start.
    """
    with tempfile.TemporaryDirectory(prefix="keras_dist-", ignore_cleanup_errors=True) as folder:
        numbers = itertools.count()

        def connect() -> Connections:
            notes = Path(folder) / f"connections-{next(numbers)}"
            variables = {} if ssh is None else _variables(library, ssh, notes, limit)
            return Connections(notes, limit, variables)

        yield connect


if __name__ == "__main__":
    sys.exit(main())
