"""join: a rank that is out of data takes part in the reductions that others still call."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist import errors
from keras_dist._engine.collectives.objects import exchange_or_raise
from keras_dist._engine.collectives.refusals import RepeatRendezvous
from keras_dist._engine.collectives.rendezvous import resolve_difference
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.digests import SPIN_SECONDS
from keras_dist._engine.recovery.retry import retry
from keras_dist._engine.recovery.ulfm import check_alive
from keras_dist._engine.shm.wait import note, waiting
from keras_dist._engine.signature import JOINED, CollectiveSignature, JoinedRanks
from keras_dist._engine.tracing import spans

LONGEST_NAP_SECONDS = 1e-3


def join_all(
    comms: Sequence[Communicator], takes_named: bool = True
) -> dict[Communicator, JoinedRanks | None]:
    """Takes part, without a contribution, in the reductions of others until all have joined.

    Collective: every rank of each communicator; blocks. The others may still reduce in any of the
    communicators, so this rank waits in all at once. Queued operations run first.

    Returns:
        For each communicator the ranks that joined first and last; `None` if all joined at once.
    """
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
    """Returns the contributions of the ranks that have not joined. Collective; blocks.

    Moves the data of an operation while some ranks have joined. It follows each rendezvous at which
    they were missing: those ranks take part in one exchange for each.
    """
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
