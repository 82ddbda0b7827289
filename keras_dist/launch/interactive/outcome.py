"""What comes of a call on many ranks: the value of each, or the error that is raised for them."""

from typing import Any

import cloudpickle

from keras_dist import errors
from keras_dist.launch.interactive.exchange import Exchange, Failure

__all__ = ["WHERE", "values"]

#: the place, in messages
WHERE = "[keras_dist.run]"
USAGE = 2  # the exit code of keras-dist run where there was no job
SHOWN_LINES = 20


def values(exchange: Exchange, np: int, code: int, said: str) -> list[Any]:
    """Returns what the ranks of a job that has ended have returned, in their order.

    Args:
        exchange: with the ranks.
        np: their number.
        code: the exit code of the job.
        said: what its launcher has printed.

    Raises:
        RankError: one has failed, or has left no value.
        LaunchError: none has started.
    """
    for rank, failure in exchange.failures(np).items():
        raise _as_error(failure, rank, np, exchange)
    outcomes = [exchange.outcome(rank) for rank in range(np)]
    started = any(exchange.log(rank).exists() for rank in range(np))
    missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if not missing and code == 0:
        return [_loaded(outcome, rank, np) for rank, outcome in enumerate(outcomes)]
    if code == USAGE and not started:
        raise errors.LaunchError(said.strip().removeprefix("keras-dist: "))
    logs = [f"rank {rank}:\n{_tail(exchange, rank)}" for rank in missing if _tail(exchange, rank)]
    text = errors.explain(
        WHERE,
        f"{np} ranks to run the function and to return",
        f"exit code {code}, and no value of {len(missing)} of them",
        "What was printed last:" if started else "Ask keras-dist doctor, or for fewer ranks.",
    )
    kind = errors.RankError if started else errors.LaunchError
    raise kind("\n".join([text, *logs, "\n".join(said.splitlines()[-SHOWN_LINES:])]))


def _loaded(outcome: Any, rank: int, np: int) -> Any:
    try:
        return cloudpickle.loads(outcome.pickled)
    except Exception as error:  # objects raise what they like
        raise errors.RankError(
            errors.explain(
                f"[rank {rank} of {np}]",
                "the function to return what can be read here",
                f"an object of type {outcome.kind} ({type(error).__name__}: {error})",
                "Return numbers, arrays or the like.",
            ),
            rank,
        ) from error


def _as_error(failure: Failure, rank: int, np: int, exchange: Exchange) -> errors.RankError:
    printed = _tail(exchange, rank) if rank else ""  # that of the root has been shown
    text = errors.explain(
        f"[rank {rank} of {np}]",
        "the function to return",
        failure.text,
        f"There:\n{failure.traceback}" + (f"It had printed:\n{printed}" if printed else ""),
    )
    error = errors.RankError(text, rank, failure.traceback)
    try:
        error.__cause__ = cloudpickle.loads(failure.pickled) if failure.pickled else None
    except Exception:  # some exceptions cannot be made from their own arguments
        error.__cause__ = None
    return error


def _tail(exchange: Exchange, rank: int) -> str:
    path = exchange.log(rank)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-SHOWN_LINES:])
