"""Operations with names: how ranks that call them in different orders find each other's.

Nothing is negotiated as long as the orders agree. Where a meeting finds different names, the ranks
tell each other which ones they hold, and take first the one that all hold and the first of them
holds longest. Where there is none yet, they wait until there is one, or no rank can call more.
"""

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from keras_dist._engine.collectives.signature import CollectiveSignature
from keras_dist._engine.collectives.ticket import Reordered
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.ulfm import assure
from keras_dist._engine.shm.wait import waiting

__all__ = ["by_name", "find_by_name"]

LONGEST_NAP_SECONDS = 10e-3

Operation = TypeVar("Operation", bound=Callable[..., Any])
Standing = tuple[tuple[str, ...], bool]


def by_name(operation: Operation) -> Operation:
    """Makes an operation with an argument `key` one that ranks find by it."""
    place = list(inspect.signature(operation).parameters).index("key") - 1

    @functools.wraps(operation)
    def run(comm: Communicator, *args: Any, **kwargs: Any) -> Any:
        key = args[place] if len(args) > place else kwargs.get("key")
        if key is None:
            return operation(comm, *args, **kwargs)
        return comm.run_by_name(functools.partial(operation, comm, *args, **kwargs), key)

    return cast(Operation, run)


def find_by_name(
    comm: Communicator, calls: Sequence[CollectiveSignature], standing: Sequence[Standing]
) -> None:
    """Lets the ranks agree on the operation that comes first, where their names differ.

    Collective: every rank of `comm`, behind a meeting; returns where the calls have no names, or
    but one, or none will ever be found by all.

    Args:
        comm: the ranks.
        calls: what each rank has come for.
        standing: which names each rank holds, and whether it can call no more; see `Line.standing`.

    Raises:
        OtherFirst: on every rank, with the name.
    """
    pairs = list(zip(calls, standing, strict=True))
    if len({call.key for call in calls}) == 1 or any(c.key not in names for c, (names, _) in pairs):
        return
    with waiting:
        _wait_for_a_name(comm, standing)


def _wait_for_a_name(comm: Communicator, standing: Sequence[Standing]) -> None:
    nap = 0.0
    while (name := _first_of_all([names for names, _ in standing])) is None:
        if all(stuck for _, stuck in standing):
            return
        time.sleep(nap)
        nap = min(LONGEST_NAP_SECONDS, 2 * nap + 1e-4)
        standing = comm.world.allgather(comm.standing())
        assure(comm)
    raise Reordered(name)


def _first_of_all(held: Sequence[Sequence[str]]) -> str | None:
    """Returns the first of the first rank's names that all ranks hold."""
    everywhere = set.intersection(*map(set, held))
    return next((name for name in held[0] if name in everywhere), None)
