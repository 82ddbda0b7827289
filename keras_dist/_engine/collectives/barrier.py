"""barrier: no rank continues before all have arrived."""

from collections.abc import Sequence
from typing import Any

from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.signature import CollectiveSignature, entries_of_arrays


@by_name
@retried
def barrier(
    comm: Communicator,
    key: str | None = None,
    operation: str = "barrier",
    arrays: Sequence[Any] = (),
    names: Sequence[str] = (),
    remedy: str = CollectiveSignature.remedy,
) -> None:
    """Waits for all ranks. Collective: every rank, for the same `operation`; blocks.

    Args:
        arrays: arrays whose shapes and dtypes must agree, before some of them are used.
    """
    entries = entries_of_arrays(names, arrays)
    with comm.lock:
        rendezvous(comm, CollectiveSignature(operation, entries, key=key, remedy=remedy))
