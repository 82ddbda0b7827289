"""barrier: no rank continues before all have arrived."""

from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.signature import CollectiveSignature

__all__ = ["barrier"]


@by_name
@retried
def barrier(comm: Communicator, key: str | None = None, operation: str = "barrier") -> None:
    """Waits for all ranks. Collective: every rank, for the same `operation`; blocks."""
    with comm.lock:
        rendezvous(comm, CollectiveSignature(operation, key=key))
