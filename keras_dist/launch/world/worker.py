"""Ranks as children of workers of another system, and the driver that gathers their outcomes.

A worker stays, and a rank may have to be ended at once, see decision 57.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from keras_dist import errors
from keras_dist.launch.cli.job_process import end_with_parent
from keras_dist.launch.interactive.outcome import (
    Failure,
    JobFiles,
    Value,
    as_failure,
    raise_failure,
    value_of,
)
from keras_dist.launch.interactive.rank import run_call
from keras_dist.launch.world.member import join_world
from keras_dist.launch.world.world_server import SETTLE_SECONDS, WorldServer

POLL_SECONDS = 0.5
END_SECONDS = 10.0  # for the ranks of a failed job to end
PREFIXES = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL")
NAMES = "LOCALID NTASKS PROCID STEP_NUM_TASKS STEP_TASKS_PER_NODE TASKS_PER_NODE"
OF_SLURM = frozenset(f"SLURM_{name}" for name in NAMES.split())

#: what a rank has left; `None` while it runs
Outcome = Value | Failure | None


def run_rank(
    work: bytes, world: Mapping[str, Any], environment: Mapping[str, str]
) -> Value | Failure:
    """Runs a function on one rank, in a child process whose output is that of this process."""
    with tempfile.TemporaryDirectory(prefix="keras_dist-") as name:
        exchange = JobFiles(pathlib.Path(name))
        exchange.put_call(({}, list(sys.path), {}, work))
        # Without what a launcher has told the worker, which is no rank.
        told = {n for n in os.environ if n.startswith(PREFIXES) or n in OF_SLURM}
        inherited = {n: text for n, text in os.environ.items() if n not in told}
        # The token is no argument, which other users of the host could read.
        ended = subprocess.run(
            [sys.executable, "-m", __name__, name],
            input=json.dumps(dict(world)).encode(),
            env={**inherited, **environment},
            preexec_fn=end_with_parent,
        )
        outcome = exchange.outcome(world["rank"])
        if outcome is None or (isinstance(outcome, Value) and ended.returncode != 0):
            text = f"The process of this rank ended with exit code {ended.returncode}."
            return Failure(text, text, b"", is_consequence=True)
        return outcome


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


def gather(poll: Callable[[float], list[Outcome]], server: WorldServer) -> list[Any]:
    """Returns the values of all ranks, when they have ended or a while after one has failed.

    `poll` waits for some seconds, or until all ranks have ended, and returns the outcome of each.

    Raises:
        RankError: a rank failed, or left no value. It names the rank that failed first.
    """
    failed = None
    while True:
        outcomes = poll(POLL_SECONDS)
        if all(outcomes):
            break
        if failed is None and (
            server.failure is not None or any(isinstance(each, Failure) for each in outcomes)
        ):
            failed = time.monotonic()
        if failed is not None and time.monotonic() > failed + END_SECONDS:
            break
    outcomes = [outcome or lost(None, server) for outcome in outcomes]
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        wait_for_cause(server)
        failures = [outcome if isinstance(outcome, Failure) else None for outcome in outcomes]
        causes = [
            failure
            if failure and not failure.is_consequence and server.failed_rank in (None, rank)
            else None
            for rank, failure in enumerate(failures)
        ]
        raise_failure(causes)
        raise errors.RankError(server.failure or next(filter(None, failures)).text)
    return [value_of(outcome, rank, len(outcomes)) for rank, outcome in enumerate(outcomes)]


def lost(error: BaseException | None, server: WorldServer) -> Failure:
    """Returns the outcome of a rank whose worker has died, or has not answered."""
    text = f"{error or server.failure or 'The worker of this rank has not answered.'}"
    return Failure(text, text, b"", is_consequence=True)


def wait_for_cause(server: WorldServer) -> None:
    """Waits until the server knows why a rank has failed; outcomes may come before."""
    with contextlib.suppress(errors.RankError):
        server.wait(2 * SETTLE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
