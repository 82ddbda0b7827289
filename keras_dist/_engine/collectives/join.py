"""Waits in several communicators at once: join, and the end of the script."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist import errors
from keras_dist._engine.collectives.differences import RepeatRendezvous, resolve_difference
from keras_dist._engine.collectives.rendezvous import exchange_or_raise, rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.gradient_sets import COMPARISON, Form, GradientSet, UnlikeGradients
from keras_dist._engine.mpi.digests import SPIN_SECONDS
from keras_dist._engine.recovery import check_alive, retried, retry
from keras_dist._engine.shm.wait import AT_THE_END, blocked, note, waiting
from keras_dist._engine.signature import JOINED, CollectiveSignature, JoinedRanks
from keras_dist._engine.tracing import spans

LONGEST_NAP_SECONDS = 1e-3


def join_all(
    comms: Sequence[Communicator], takes_named: bool = True
) -> dict[Communicator, JoinedRanks | None]:
    """Takes part, without a contribution, in the reductions of others until all have joined.

    Collective: every rank of each communicator; blocks. Returns which ranks joined first and last
    in each; `None` if all joined at once.
    """
    # The others may still reduce in any of the communicators, so this rank waits in all at once,
    # after what is queued.
    found = retry(comms[0], lambda: _join(comms, takes_named), joins=True)
    return dict(zip(comms, found, strict=True))


def _join(comms: Sequence[Communicator], takes_named: bool) -> list[JoinedRanks | None]:
    call = CollectiveSignature(JOINED, takes_named=takes_named)
    found: dict[Communicator, JoinedRanks | None] = dict.fromkeys(comms)
    with contextlib.ExitStack() as locks:
        for comm in comms:
            if takes_named:
                comm.order.finish()
            locks.enter_context(comm.lock)
        locks.enter_context(spans.rendezvous(call))
        answers = {comm: comm.digests.start(call.digest) for comm in comms if comm.size > 1}
        while answers:
            note(comms[0].ranks, call)
            with waiting:
                comm, same = _next_answer(answers)
            if same:
                found[comm], comm.faults.joined = comm.faults.joined, None
                comm.faults.joins += found[comm] is not None
                del answers[comm]
            else:
                with contextlib.suppress(RepeatRendezvous):  # they run another operation first
                    resolve_difference(comm, call)
                    _exchange(comm, None)
                answers[comm] = comm.digests.start(call.digest)
    return list(found.values())


def _next_answer(answers: dict[Communicator, Callable[[], bool | None]]) -> tuple[Any, bool]:
    """Waits for the first answer; returns its communicator and whether the digests are equal."""
    start = time.perf_counter()
    while True:
        for comm, answer in answers.items():
            same = answer()
            if same is not None:
                return comm, same
        waited = time.perf_counter() - start
        if waited > SPIN_SECONDS:
            time.sleep(min(waited / 8, LONGEST_NAP_SECONDS))


def exchange_among(comm: Communicator, mine: Any) -> list[Any]:
    """Returns the contributions of the ranks that have not joined. Collective; blocks."""
    # Follows each rendezvous at which ranks were missing, which take part in one exchange for each.
    joined = comm.faults.joined
    here = joined.here if joined is not None else range(comm.size)
    everyone = _exchange(comm, mine)
    return [everyone[index] for index in here]


def _exchange(comm: Communicator, mine: Any) -> list[Any]:
    try:
        everyone = exchange_or_raise(comm, mine)
        check_alive(comm)
        return everyone
    except errors.KerasDistError:
        comm.faults.joined = None  # the error ends it on all ranks
        raise


def wait_for_end(comms: Sequence[Communicator], operation: str = AT_THE_END) -> None:
    """Waits until every rank is in this last operation. Collective; blocks."""
    for comm in comms:
        comm.order.drain()
    # Ranks that still work may wait in any of the communicators, so this rank waits in all at once.
    # The stall watchdog reports this wait but does not end the job while others may still work.
    retry(comms[0], lambda: _wait(comms, operation))


def _wait(comms: Sequence[Communicator], operation: str) -> None:
    call = CollectiveSignature(operation)
    note(comms[0].ranks, call)
    with contextlib.ExitStack() as locks:
        for comm in comms:
            locks.enter_context(comm.lock)
        locks.enter_context(spans.rendezvous(call))
        locks.enter_context(blocked)
        answers = {comm: comm.digests.start(call.digest) for comm in comms if comm.size > 1}
        while answers:
            comm, same = _next_answer(answers)
            del answers[comm]
            if not same:
                try:
                    resolve_difference(comm, call)
                except RepeatRendezvous:  # they run another operation first
                    answers[comm] = comm.digests.start(call.digest)


@retried
def compare_gradients(
    comm: Communicator, gradients: GradientSet, remedy: str
) -> tuple[Form | None, ...]:
    """Returns the form of each gradient that any rank has. Collective: every rank; blocks."""
    # Ranks may start to reduce instead: they repeat their rendezvous if they can reduce these.
    call = CollectiveSignature(COMPARISON, gradients=gradients, spares=True, remedy=remedy)
    try:
        with comm.lock:
            rendezvous(comm, call)
            if comm.faults.joined is not None:
                exchange_among(comm, None)
    except UnlikeGradients as found:
        return found.forms
    return gradients.forms
