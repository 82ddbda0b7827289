"""The end of the script: the last rendezvous, at which every rank must arrive."""

import contextlib
import time
from collections.abc import Sequence

from keras_dist._engine.collectives.rendezvous import resolve_difference
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.digests import NAP_SECONDS
from keras_dist._engine.recovery.retry import retry
from keras_dist._engine.shm.wait import AT_THE_END, blocked, note
from keras_dist._engine.signature import CollectiveSignature
from keras_dist._engine.tracing import spans


def wait_for_end(comms: Sequence[Communicator]) -> None:
    """Waits until every rank is at the end of its script, then closes services.

    Collective: every rank; blocks. Ranks that still work may wait in any of the communicators, so
    this rank waits in all at once. Queued operations run first. The stall watchdog reports this
    wait but does not end the job while the other ranks may still be working.
    """
    for comm in comms:
        comm.order.drain()
    retry(comms[0], lambda: _wait(comms))
    comms[0].close_services()


def _wait(comms: Sequence[Communicator]) -> None:
    call = CollectiveSignature(AT_THE_END)
    note(comms[0].ranks, call)
    with contextlib.ExitStack() as locks:
        for comm in comms:
            locks.enter_context(comm.lock)
        locks.enter_context(spans.rendezvous(call))
        locks.enter_context(blocked)
        answers = {comm: comm.digests.start(call.digest) for comm in comms if comm.size > 1}
        while answers:
            for comm, answer in list(answers.items()):
                same = answer()
                if same is not None:
                    del answers[comm]
                if same is False:
                    resolve_difference(comm, call)
            time.sleep(NAP_SECONDS)
