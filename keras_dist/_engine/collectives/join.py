"""join: a rank that has no more data takes part in the reductions that others still call."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist import errors
from keras_dist._engine.collectives.objects import exchange_or_raise
from keras_dist._engine.collectives.rendezvous import tell_difference
from keras_dist._engine.collectives.signature import JOINED, CollectiveSignature, JoinedRanks
from keras_dist._engine.communicator import SPIN_SECONDS, Communicator
from keras_dist._engine.faults.retry import retry
from keras_dist._engine.faults.ulfm import assure
from keras_dist._engine.shm.wait import note, waiting
from keras_dist._engine.tracing import spans

__all__ = ["exchange_among", "stand_in"]

LONGEST_NAP_SECONDS = 1e-3


def stand_in(comms: Sequence[Communicator]) -> dict[Communicator, JoinedRanks | None]:
    """Takes part, with nothing, in the reductions of others until all ranks have come here.

    Collective: every rank of each communicator; blocks. Others still reduce in one of them,
    nobody knows which; so this rank comes to all of them at once. What is queued runs first.

    Args:
        comms: all communicators that this rank is in.

    Returns:
        For each of them who came first and who last; `None` where nobody was missed.

    Raises:
        MismatchError: other ranks call what has no meaning without this one; raised on every
            rank. The further communicators are of no use then: this rank has come there.
    """
    absences = retry(comms[0], lambda: _stand_in(comms), joins=True)
    return dict(zip(comms, absences, strict=True))


def _stand_in(comms: Sequence[Communicator]) -> list[JoinedRanks | None]:
    call = CollectiveSignature(JOINED)
    found: dict[Communicator, JoinedRanks | None] = dict.fromkeys(comms)
    with contextlib.ExitStack() as locks:
        for comm in comms:
            locks.enter_context(comm.lock)
        locks.enter_context(spans.meeting(call))
        answers = {comm: comm.come(call.digest) for comm in comms if comm.size > 1}
        while answers:
            note(comms[0].ranks, call)
            with waiting:
                comm, same = _next_answer(answers)
            if same:
                found[comm], comm.absence = comm.absence, None
                del answers[comm]
            else:
                tell_difference(comm, call)
                _exchange(comm, None)
                answers[comm] = comm.come(call.digest)
    return list(found.values())


def _next_answer(answers: dict[Communicator, Callable[[], bool | None]]) -> tuple[Any, bool]:
    """Waits for the first of some meetings; returns whose it is, and whether all are alike."""
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
    """Returns what the ranks that are here bring, in rank order. Collective; blocks.

    It takes the place of what moves data while some ranks have joined, and follows each
    meeting at which they were missed: they take part in one exchange for each.

    Args:
        comm: the ranks, of which some have joined, as `comm.absence` says.
        mine: what this rank brings; a `KerasDistError` is raised on every rank.
    """
    here = comm.absence.here if comm.absence is not None else range(comm.size)
    everyone = _exchange(comm, mine)
    return [everyone[place] for place in here]


def _exchange(comm: Communicator, mine: Any) -> list[Any]:
    try:
        everyone = exchange_or_raise(comm, mine)
        assure(comm)
        return everyone
    except errors.KerasDistError:
        comm.absence = None  # the error ends it on all ranks alike
        raise
