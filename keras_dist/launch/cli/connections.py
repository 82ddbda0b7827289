"""The connections of mpiexec to other hosts, and the hosts that are lost while a job runs."""

import contextlib
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keras_dist import errors
from keras_dist.launch.cli.mpiexec import Library
from keras_dist.launch.remote_shell import agent_command, read_notes


class Connections:
    """The connections of one job.

    Args:
        limit: seconds after which a host that does not answer is lost; 0: never.
    """

    def __init__(self, notes: Path | None = None, limit: int = 0, agent: str = ""):
        self._notes, self._limit = notes, limit
        self.variables = {"PRTE_MCA_plm_ssh_agent": agent} if agent else {}

    def begin(self) -> None:
        """Forgets what was noted, before a start of the job."""
        if self._notes is not None:
            self._notes.unlink(missing_ok=True)

    def lost(self) -> str:
        """Returns an error that names the hosts that are lost; empty if there are none."""
        found = {} if self._notes is None else read_notes(self._notes)
        if not found:
            return ""
        told = ", ".join(f"exit code {code} of ssh to {host}" for host, code in found.items())
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


@contextlib.contextmanager
def watched_connections(library: Library, ssh: str | None, limit: int) -> Iterator[Connections]:
    """Watches the connections of a job while mpiexec enters hosts by ssh.

    Only mpiexec of Open MPI needs it: Hydra notices by itself that ranks are gone.

    Args:
        limit: seconds after which a host that does not answer is lost; 0: never.
    """
    with tempfile.TemporaryDirectory(prefix="keras_dist-") as folder:
        notes = Path(folder) / "connections"
        words = [] if ssh is None else agent_command(ssh, notes, limit)
        if not words or not library.survives_rank_loss or shlex.join(words) != " ".join(words):
            yield Connections()  # PRRTE divides a command at its blanks
        else:
            yield Connections(notes, limit, " ".join(words))
