"""Buffers that MPI itself reads and writes, where they lie: on a GPU too, if it is CUDA-aware."""

from collections.abc import Sequence
from typing import Any

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous, telling
from keras_dist._engine.collectives.signature import CollectiveSignature, Entry
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.shm.wait import blocked
from keras_dist._engine.tracing import spans

__all__ = ["allreduce_in_place", "broadcast_in_place"]

OPS = {ReduceOp.SUM: "SUM", ReduceOp.MIN: "MIN", ReduceOp.MAX: "MAX", ReduceOp.PRODUCT: "PROD"}


@by_name
def allreduce_in_place(
    comm: Communicator,
    buffers: Sequence[Any],
    entries: Sequence[Entry],
    op: ReduceOp,
    key: str | None = None,
) -> None:
    """Reduces buffers, each by one call of MPI, which adds them up in an order of its own.

    Collective: every rank of `comm`; blocks. Ranks that have joined cannot take part, and none can
    be lost meanwhile.

    Args:
        comm: the ranks.
        buffers: what mpi4py takes, contiguous; written.
        entries: names, shapes and dtypes, on which the ranks must agree.
        op: `SUM`, `MIN`, `MAX` or `PRODUCT`.
        key: a name under which the ranks must meet; `None` for none.

    Raises:
        MismatchError: the ranks differ.
    """
    with comm.lock:
        rendezvous(comm, CollectiveSignature("allreduce by MPI", tuple(entries), op.value, key=key))
        with blocked, spans.phase("reduce through MPI"):
            for buffer in buffers:
                comm.world.Allreduce(comm.mpi.IN_PLACE, buffer, getattr(comm.mpi, OPS[op]))


@by_name
def broadcast_in_place(
    comm: Communicator,
    buffers: Sequence[Any],
    entries: Sequence[Entry],
    root: int,
    key: str | None = None,
) -> None:
    """Writes the root's buffers into those of every rank, each by one call of MPI.

    Collective: as `allreduce_in_place`.

    Args:
        comm: the ranks.
        buffers: as for `allreduce_in_place`.
        entries: as for `allreduce_in_place`.
        root: the rank of the job whose values all receive.
        key: as for `allreduce_in_place`.

    Raises:
        ArgumentError: `root` is not one of the ranks.
        MismatchError: the ranks differ.
    """
    with telling(comm, "broadcast by MPI", key):
        place = comm.place_of_root(root)
    with comm.lock:
        rendezvous(
            comm, CollectiveSignature("broadcast by MPI", tuple(entries), root=int(root), key=key)
        )
        with blocked, spans.phase("transfer"):
            for buffer in buffers:
                comm.world.Bcast(buffer, root=place)
