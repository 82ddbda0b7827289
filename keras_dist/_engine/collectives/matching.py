"""Named operations: ranks that call them in different orders match them by name.

Nothing is negotiated while the orders agree. If the ranks of a rendezvous bring different names,
they exchange the names that they hold and first run the one that all hold and that rank 0 has held
longest. If there is none yet, they wait until there is one, or until no rank can call more.
"""

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from keras_dist._engine.communicator import Communicator
from keras_dist._engine.ordering.queue import HeldNames
from keras_dist._engine.ordering.ticket import Reordered
from keras_dist._engine.recovery.ulfm import check_alive
from keras_dist._engine.shm.wait import waiting
from keras_dist._engine.signature import CollectiveSignature

__all__ = ["by_name", "key_of", "match_names"]

LONGEST_NAP_SECONDS = 10e-3

Operation = TypeVar("Operation", bound=Callable[..., Any])


def by_name(operation: Operation) -> Operation:
    """Makes ranks match an operation by its argument `key`, or by that of its `options`."""
    key_among = key_of(operation)

    @functools.wraps(operation)
    def run(comm: Communicator, *args: Any, **kwargs: Any) -> Any:
        key = key_among(*args, **kwargs)
        if key is None or comm.size == 1:
            return operation(comm, *args, **kwargs)
        return comm.order.run_by_name(functools.partial(operation, comm, *args, **kwargs), key)

    return cast(Operation, run)


def key_of(operation: Callable[..., Any]) -> Callable[..., str | None]:
    """Returns a function that finds the user's name among the arguments of an operation.

    Args:
        operation: its arguments after the ranks are those of the function.
    """
    parameters = list(inspect.signature(operation).parameters)
    holder = "options" if "options" in parameters else "key"
    index = parameters.index(holder) - 1

    def find(*args: Any, **kwargs: Any) -> str | None:
        found = args[index] if len(args) > index else kwargs.get(holder)
        key: str | None = found.key if found is not None and holder == "options" else found
        return key

    return find


def match_names(
    comm: Communicator, calls: Sequence[CollectiveSignature], held: Sequence[HeldNames]
) -> None:
    """Lets the ranks agree on the operation to run first, if their names differ.

    Collective: every rank of `comm`, within a rendezvous. Returns if the operations have no names,
    or the same, or none that all ranks will ever hold.

    Args:
        comm: the ranks.
        calls: signature of the operation of each rank.
        held: names that each rank holds; see `CollectiveQueue.held_names`.

    Raises:
        Reordered: on every rank, with the name to run first.
    """
    pairs = list(zip(calls, held, strict=True))
    if len({call.key for call in calls}) == 1 or any(c.key not in names for c, (names, _) in pairs):
        return
    with waiting:
        _wait_for_common_name(comm, held)


def _wait_for_common_name(comm: Communicator, held: Sequence[HeldNames]) -> None:
    nap = 0.0
    while (name := _first_common([names for names, _ in held])) is None:
        if all(is_complete for _, is_complete in held):
            return
        time.sleep(nap)
        nap = min(LONGEST_NAP_SECONDS, 2 * nap + 1e-4)
        held = comm.world.allgather(comm.order.held_names())
        check_alive(comm)
    raise Reordered(name)


def _first_common(held: Sequence[Sequence[str]]) -> str | None:
    """Returns the first of the first rank's names that all ranks hold."""
    common = set.intersection(*map(set, held))
    return next((name for name in held[0] if name in common), None)
