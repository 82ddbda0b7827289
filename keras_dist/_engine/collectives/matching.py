"""Named operations: ranks that call them in different orders match them by name.

Nothing is negotiated while the orders agree. If the ranks of a rendezvous bring different names, or
some a name and others none, they exchange what they hold and first run the operation without a name
if all hold one, otherwise the name that all hold and that rank 0 has held longest. If there is none
yet, they wait until there is one, or until no rank can call more.
"""

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from keras_dist._engine.collectives.refusals import RepeatRendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.ordering.queue import HeldNames
from keras_dist._engine.ordering.ticket import Reordered
from keras_dist._engine.recovery.ulfm import check_alive
from keras_dist._engine.shm.wait import AT_THE_END, waiting
from keras_dist._engine.signature import JOINED, CollectiveSignature

LONGEST_NAP_SECONDS = 10e-3

Operation = TypeVar("Operation", bound=Callable[..., Any])


def by_name(operation: Operation) -> Operation:
    """Makes ranks match an operation by its argument `key`, or by that of its `options`."""
    key_among = key_of(operation)

    @functools.wraps(operation)
    def run(comm: Communicator, *args: Any, **kwargs: Any) -> Any:
        key = key_among(*args, **kwargs)
        if comm.size == 1:
            return operation(comm, *args, **kwargs)
        return comm.order.run_by_name(functools.partial(operation, comm, *args, **kwargs), key)

    return cast(Operation, run)


def key_of(operation: Callable[..., Any]) -> Callable[..., str | None]:
    """Returns a function that finds the user's name among the arguments of an operation."""
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
) -> bool:
    """Lets the ranks agree on the operation to run first, if their names differ.

    Collective: every rank of `comm`, within a rendezvous. Ranks that have joined take part in any
    operation, those in `fit` only in operations without a name.
    """
    here = [
        index
        for index, call in enumerate(calls)
        if call.operation != JOINED or not call.takes_named
    ]
    keys = [(calls[index].key, held[index].names) for index in here]
    if len({key for key, _ in keys}) <= 1 or any(key not in names for key, names in keys):
        return False
    if any(calls[index].operation == AT_THE_END for index in here):
        found = _common([held[index] for index in here])  # that rank calls no more
    else:
        with waiting:
            found = _wait_for_common(comm, held, here)
    if not found:
        return True
    mine = calls[comm.rank]
    if mine.operation == JOINED or mine.key is found[0] is None:
        raise RepeatRendezvous
    raise Reordered(found[0])


def _wait_for_common(
    comm: Communicator, held: Sequence[HeldNames], here: Sequence[int]
) -> list[str | None]:
    """Returns the name of the operation to run first, in a list that is empty if there is none."""
    nap = 0.0
    while True:
        those = [held[index] for index in here]
        found = _common(those)
        if found or all(each.is_complete for each in those):
            return found
        time.sleep(nap)
        nap = min(LONGEST_NAP_SECONDS, 2 * nap + 1e-4)
        held = comm.world.allgather(comm.order.held_names())
        check_alive(comm)


def _common(held: Sequence[HeldNames]) -> list[str | None]:
    """Returns the first of the first rank's names that all ranks hold and may run; if any."""
    common = set[str | None].intersection(*(set(each.names) for each in held))
    if None in common:
        return [None]
    all_give_way = all(each.gives_way for each in held)
    return [name for name in held[0].names if name in common and all_give_way][:1]
