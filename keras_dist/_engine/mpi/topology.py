"""The place of a rank: in the job, on its node, and among the nodes."""

from collections.abc import Sequence
from typing import Any

from keras_dist._engine.shm.wait import blocked


class Topology:
    """The ranks of an MPI communicator, and which of them share a node.

    Describes one process until `discover` has run.

    Attributes:
        rank: this rank, 0 to `size - 1`.
        size: number of ranks.
        local_rank: index of this rank on its node.
        local_size: number of ranks on this node.
        cross_rank: index of this node among those that have a rank of this `local_rank`.
        cross_size: number of those nodes.
        is_homogeneous: whether all nodes have the same number of ranks.
        nodes: ranks of each node, both in ascending order of their first rank.
        slices: number of ranks of the smallest node: as many slices of an array cross nodes.
        first_on_node: the first rank of this node.
        local: MPI communicator of the ranks of this node.
        across: MPI communicator of the ranks of this `local_rank`, one on each node that has it, in
            the order of `nodes`.
    """

    def __init__(self, world: Any | None = None):
        self.world: Any = world
        self.local: Any = None
        self.across: Any = None
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1
        self.cross_rank, self.cross_size = 0, 1
        self.is_homogeneous = True
        self.nodes = [[0]]
        self.slices = 1
        self.first_on_node = 0

    def discover(self, mpi: Any) -> None:
        """Finds out the place of every rank. Collective: every rank; blocks."""
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.local = self.world.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = self.local.Get_rank(), self.local.Get_size()
        self.first_on_node = self.local.bcast(self.rank)
        self.across = self.world.Split(color=self.local_rank, key=self.first_on_node)
        self.cross_rank, self.cross_size = self.across.Get_rank(), self.across.Get_size()
        with_first = enumerate(self.world.allgather(self.first_on_node))
        members: dict[int, list[int]] = {}
        for rank, first in with_first:
            members.setdefault(first, []).append(rank)
        self.nodes = [members[first] for first in sorted(members)]
        self.slices = min(map(len, self.nodes))
        self.is_homogeneous = self.slices == max(map(len, self.nodes))

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.local_size == self.size

    @property
    def has_slice(self) -> bool:
        """Whether this rank exchanges a slice with the same local rank of all other nodes."""
        return self.local_rank < self.slices

    @property
    def mpi_communicators(self) -> tuple[Any, ...]:
        """The MPI communicators, to free or to revoke."""
        return tuple(comm for comm in (self.across, self.local, self.world) if comm is not None)


def allgather(comm: Any, value: Any) -> list[Any]:
    """Returns the objects of all ranks of an MPI communicator, in rank order. Collective."""
    with blocked:
        return comm.allgather(value)


def first_error(comm: Any, error: str | None) -> str | None:
    """Returns the error of the first rank that has one, equal on all ranks. Collective."""
    found: Sequence[str | None] = allgather(comm, error)
    return next((text for text in found if text is not None), None)
