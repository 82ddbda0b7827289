"""A rank as a child of a worker of another system.

MPI cannot be initialized twice in a process, and a rank may have to be ended at once. So a worker,
which stays, runs each rank in a process of its own.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from keras_dist.launch.cli.job import end_with_parent
from keras_dist.launch.interactive.exchange import Failure, JobFiles, Value
from keras_dist.launch.interactive.rank import as_failure, run_call
from keras_dist.launch.world.member import join_world

PREFIXES = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL")
OF_SLURM = frozenset(
    f"SLURM_{name}"
    for name in (
        *("LOCALID", "NTASKS", "PROCID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE"),
        "TASKS_PER_NODE",
    )
)


def run_rank(
    work: bytes, world: Mapping[str, Any], environment: Mapping[str, str]
) -> Value | Failure:
    """Runs a function on one rank, in a child process whose output is that of this process."""
    with tempfile.TemporaryDirectory(prefix="keras_dist-") as name:
        exchange = JobFiles(pathlib.Path(name))
        exchange.put_call(({}, list(sys.path), {}, work))
        # The token is no argument, which other users of the host could read.
        ended = subprocess.run(
            [sys.executable, "-m", __name__, name],
            input=json.dumps(dict(world)).encode(),
            env={**_inherited(), **environment},
            preexec_fn=end_with_parent,
        )
        outcome = exchange.outcome(world["rank"])
        if outcome is None or (isinstance(outcome, Value) and ended.returncode != 0):
            text = f"The process of this rank ended with exit code {ended.returncode}."
            return Failure(text, text, b"", is_consequence=True)
        return outcome


def _inherited() -> dict[str, str]:
    """Returns the environment without what a launcher has told the worker, which is no rank."""
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(PREFIXES) and name not in OF_SLURM
    }


def main(folder: str) -> None:
    """Joins the world that the standard input describes, and runs the call of an exchange."""
    world, exchange = json.load(sys.stdin), JobFiles(pathlib.Path(folder))
    try:
        member = join_world(**world)
    except BaseException as error:
        exchange.put_outcome(world["rank"], as_failure(error))
        raise
    try:
        run_call(exchange, world["rank"])
    except BaseException as error:
        member.fail_with(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
