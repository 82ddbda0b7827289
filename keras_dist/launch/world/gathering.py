"""The outcomes of the ranks of a world, as the values of a call or one error."""

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from keras_dist import errors
from keras_dist.launch.interactive.exchange import Failure, JobFiles, Value
from keras_dist.launch.interactive.outcome import values
from keras_dist.launch.world.server import SETTLE_SECONDS, WorldServer

POLL_SECONDS = 0.5
END_SECONDS = 10.0  # for the ranks of a failed job to end

#: what a rank has left; `None` while it runs
Outcome = Value | Failure | None


def gather(poll: Callable[[float], list[Outcome]], server: WorldServer) -> list[Any]:
    """Waits until all ranks have ended, or a while after the first one has failed.

    Args:
        poll: waits for the given seconds, or until all ranks have ended, and returns the outcome
            of each.
        server: the server of the world.

    Returns:
        The value of each rank, in the order of ranks.

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
    return _values([outcome or lost(None, server) for outcome in outcomes], server)


def lost(error: BaseException | None, server: WorldServer) -> Failure:
    """Returns the outcome of a rank whose worker has died, or has not answered."""
    text = f"{error or server.failure or 'The worker of this rank has not answered.'}"
    return Failure(text, text, b"", is_consequence=True)


def wait_for_cause(server: WorldServer) -> None:
    """Waits until the server knows why a rank has failed; outcomes may come before."""
    with contextlib.suppress(errors.RankError):
        server.wait(2 * SETTLE_SECONDS)


def _values(outcomes: list[Value | Failure], server: WorldServer) -> list[Any]:
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        wait_for_cause(server)
    with tempfile.TemporaryDirectory(prefix="keras_dist-") as name:
        exchange = JobFiles(pathlib.Path(name))
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, Failure) and server.failed_rank not in (None, rank):
                outcome = dataclasses.replace(outcome, is_consequence=True)
            exchange.put_outcome(rank, outcome)
        failures = exchange.failures(len(outcomes))
        if failures and all(failure.is_consequence for failure in failures.values()):
            raise errors.RankError(server.failure or next(iter(failures.values())).text)
        return values(exchange, len(outcomes), 0, "")
