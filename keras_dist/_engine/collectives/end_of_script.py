"""The end of the script: the last meeting, at which no rank may be missing."""

import contextlib
import time
from collections.abc import Sequence

from keras_dist._engine.collectives.rendezvous import tell_difference
from keras_dist._engine.collectives.signature import CollectiveSignature
from keras_dist._engine.communicator import NAP_SECONDS, Communicator
from keras_dist._engine.faults.retry import retry
from keras_dist._engine.shm.wait import AT_THE_END, blocked, note
from keras_dist._engine.tracing import spans

__all__ = ["at_the_end"]


def at_the_end(comms: Sequence[Communicator]) -> None:
    """Waits until every rank has come to the end of its script. Collective; blocks.

    A rank that is still at work waits in one of its communicators, nobody knows which; so
    this one comes to all of them at once. What is queued runs first. The watch tells of this wait,
    but ends no job where the others may have much to do; when all have come it ends, and all that
    attends.

    Args:
        comms: all communicators that this rank is in, first that of all ranks.

    Raises:
        MismatchError: another rank is in a collective, for which this one has gone.
    """
    for comm in comms:
        comm.finish_queued()
    retry(comms[0], lambda: _come_to_the_end(comms))
    comms[0].close_services()
    comms[0].dismiss()


def _come_to_the_end(comms: Sequence[Communicator]) -> None:
    call = CollectiveSignature(AT_THE_END)
    note(comms[0].ranks, call)
    with contextlib.ExitStack() as locks:
        for comm in comms:
            locks.enter_context(comm.lock)
        locks.enter_context(spans.meeting(call))
        locks.enter_context(blocked)
        answers = {comm: comm.come(call.digest) for comm in comms if comm.size > 1}
        while answers:
            for comm, answer in list(answers.items()):
                same = answer()
                if same is not None:
                    del answers[comm]
                if same is False:
                    tell_difference(comm, call)
            time.sleep(NAP_SECONDS)
