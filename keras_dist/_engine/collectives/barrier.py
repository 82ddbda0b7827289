"""barrier: no rank goes on before all have come."""

from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.signature import CollectiveSignature
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import retried

__all__ = ["barrier"]


@by_name
@retried
def barrier(comm: Communicator, key: str | None = None, operation: str = "barrier") -> None:
    """Waits for all ranks. Collective: every rank, for the same `operation`; blocks."""
    with comm.lock:
        rendezvous(comm, CollectiveSignature(operation, key=key))
