"""The program by which mpiexec of Open MPI enters a host: ssh, and a note of how it ends.

That mpiexec waits forever for a host that is lost, as ssh does, or ends with exit code 0 if ssh
fails. With this program ssh notices a host that does not answer, and `keras-dist run` is told.
Imports no MPI.
"""

import argparse
import contextlib
import subprocess
import sys
from pathlib import Path

from keras_dist.launch.cli.job import end_with_parent

MAX_UNANSWERED = 4  # messages to a host
SSH_FAILED = 255  # exit code of ssh for errors of its own, such as a host that does not answer


def agent_command(ssh: str, notes: Path, limit: int) -> list[str]:
    """Returns the command of this program, to be followed by a host and a command there.

    Args:
        limit: seconds after which a host that does not answer is lost; 0: never.
    """
    module = [sys.executable, "-P", "-m", "keras_dist.launch.remote_shell"]
    # mpiexec drops a last word without a dash.
    return [*module, f"--ssh={ssh}", f"--notes={notes}", f"--limit={limit}"]


def read_notes(notes: Path) -> dict[str, int]:
    """Returns the hosts whose connection has broken, and the exit code of ssh for each."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return {host: int(code) for host, code in map(str.split, lines)}


def main() -> int:
    """Runs ssh, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m keras_dist.launch.remote_shell")
    parser.add_argument("--ssh", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("host")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    words = [options.ssh, "-x", *_alive_options(options.limit), options.host, *options.command]
    code = subprocess.call(words, preexec_fn=end_with_parent)
    if code < 0 or code == SSH_FAILED:
        # Where mpiexec enters many hosts, some of them enter others, without the folder.
        with contextlib.suppress(OSError), options.notes.open("a") as notes:
            notes.write(f"{options.host} {code}\n")
    return code if code >= 0 else 128 - code  # the convention of shells


def _alive_options(limit: int) -> list[str]:
    """Returns the options with which ssh ends if a host does not answer for some seconds."""
    if not limit:
        return []
    interval = max(1, limit // (MAX_UNANSWERED + 1))
    return [
        "-o",
        f"ServerAliveInterval={interval}",
        "-o",
        f"ServerAliveCountMax={MAX_UNANSWERED}",
    ]


if __name__ == "__main__":
    sys.exit(main())
