"""The end of the script: the last meeting, at which no rank may be missing."""

from keras_dist._engine.agreement import Call
from keras_dist._engine.collectives.meet import meet
from keras_dist._engine.communicator import Communicator

__all__ = ["at_the_end"]


def at_the_end(comm: Communicator) -> None:
    """Waits until every rank has come to the end of its script. Collective; blocks.

    Raises:
        MismatchError: another rank is in a collective, for which this one has gone.
    """
    with comm.lock:
        meet(comm, Call("the end of the script"))
