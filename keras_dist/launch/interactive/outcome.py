"""The outcome of a call on many ranks: the value of each rank, or one error."""

from typing import Any

import cloudpickle

from keras_dist import errors
from keras_dist.launch.interactive.exchange import Failure, JobFiles

#: the place, in messages
WHERE = "[keras_dist.run]"
USAGE = 2  # exit code of keras-dist run without a job
SHOWN_LINES = 20


def values(exchange: JobFiles, np: int, code: int, printed_by_launcher: str) -> list[Any]:
    """Returns the values of the ranks of a finished job, in the order of ranks."""
    for rank, failure in exchange.failures(np).items():
        raise _as_error(failure, rank, np, exchange)
    outcomes = [exchange.outcome(rank) for rank in range(np)]
    started = any(exchange.log(rank).exists() for rank in range(np))
    missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if not missing and code == 0:
        return [_loaded(outcome, rank, np) for rank, outcome in enumerate(outcomes)]
    if code == USAGE and not started:
        raise errors.LaunchError(printed_by_launcher.strip().removeprefix("keras-dist: "))
    logs = [f"rank {rank}:\n{_tail(exchange, rank)}" for rank in missing if _tail(exchange, rank)]
    text = errors.explain(
        WHERE,
        f"{np} ranks to run the function and to return",
        f"exit code {code}, and no value of {len(missing)} of them",
        "Last output:" if started else "Run keras-dist doctor, or start fewer ranks.",
    )
    kind = errors.RankError if started else errors.LaunchError
    raise kind("\n".join([text, *logs, "\n".join(printed_by_launcher.splitlines()[-SHOWN_LINES:])]))


def _loaded(outcome: Any, rank: int, np: int) -> Any:
    try:
        return cloudpickle.loads(outcome.pickled)
    except Exception as error:  # unpickling may raise anything
        raise errors.RankError(
            errors.explain(
                f"[rank {rank} of {np}]",
                "a return value that can be unpickled here",
                f"an object of type {outcome.kind} ({type(error).__name__}: {error})",
                "Return numbers or arrays, for example.",
            ),
            rank,
        ) from error


def _as_error(failure: Failure, rank: int, np: int, exchange: JobFiles) -> errors.RankError:
    printed = _tail(exchange, rank) if rank else ""  # the output of the root was shown
    text = errors.explain(
        f"[rank {rank} of {np}]",
        "the function to return",
        failure.text,
        f"Traceback:\n{failure.traceback}" + (f"Output:\n{printed}" if printed else ""),
    )
    error = errors.RankError(text, rank, failure.traceback)
    try:
        error.__cause__ = cloudpickle.loads(failure.pickled) if failure.pickled else None
    except Exception:  # some exceptions cannot be rebuilt from their arguments
        error.__cause__ = None
    return error


def _tail(exchange: JobFiles, rank: int) -> str:
    path = exchange.log(rank)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-SHOWN_LINES:])
