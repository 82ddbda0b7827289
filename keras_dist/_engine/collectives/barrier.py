"""barrier: no rank goes on before all have come."""

from keras_dist._engine.agreement import Call
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.meet import meet
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.recovery import survives

__all__ = ["barrier"]


@by_name
@survives
def barrier(comm: Communicator, key: str | None = None, operation: str = "barrier") -> None:
    """Waits for all ranks. Collective: every rank, for the same `operation`; blocks."""
    with comm.lock:
        meet(comm, Call(operation, key=key))
