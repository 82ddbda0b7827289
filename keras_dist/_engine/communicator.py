"""The ranks of the job, and how bytes travel between them. Independent of frameworks.

A `Communicator` is a private duplicate of the world or of the user's communicator: messages of
keras_dist and of the user never match each other.
"""

import dataclasses
import functools
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from keras_dist import errors
from keras_dist._engine.faults.rank_state import lost
from keras_dist._engine.faults.stall_watchdog import StallWatchdog
from keras_dist._engine.memory import IdleMemory, ResultPool, RowMemory
from keras_dist._engine.mpi.digests import DigestExchange, decline
from keras_dist._engine.mpi.library import NO_ROOM, MemoryFence, orders_stores
from keras_dist._engine.mpi.topology import (
    SLOW,
    Topology,
    allgather,
    first_error,
    halving_nbytes,
    measure_rate,
    ranks_in,
)
from keras_dist._engine.mpi.transfer import allgather_parts, as_message
from keras_dist._engine.ordering.order import CollectiveOrder
from keras_dist._engine.shm.node import Node, attach_node
from keras_dist._engine.shm.region import RegionPool
from keras_dist._engine.shm.segments import Segment, TooManyFiles
from keras_dist._engine.shm.wait import blocked
from keras_dist._engine.sideband import Services
from keras_dist._engine.signature import JoinedRanks

_log = logging.getLogger("keras_dist")
M = TypeVar("M")

TOO_MANY_FILES = (
    "Let a process open more files, by ulimit -n before the job starts, or keep fewer models."
)


@dataclasses.dataclass
class FaultState:
    """Faults of one communicator."""

    retry: Any = None
    losses: int = 0
    changes: int = 0
    mismatch: str | None = None
    joined: JoinedRanks | None = None
    joins: int = 0
    on_missing: Callable[[], None] | None = None

    def tell_missing(self) -> None:
        if self.on_missing is not None:
            self.on_missing()


class Communicator:
    """Ranks that train together: all ranks of the job, or those of a process set."""

    def __init__(
        self,
        mpi: Any | None = None,
        comm: Any | None = None,
        reduce: str = "copy",
        job: "Communicator | None" = None,
        ranks: Sequence[int] | None = None,
        reduction: str = "ordered",
    ):
        self.mpi: Any = mpi
        self.reduce, self.reduction = reduce, reduction
        self.thread_multiple = mpi is None or mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        self._job = job
        self.ranks: Sequence[int] = ranks or (0,)
        label = "communication"
        if job is not None:
            label += f" of ranks {', '.join(map(str, self.ranks))}"
        # Where MPI allows one thread at a time, process sets share the order of the job.
        shared = None if job is None or self.thread_multiple else job.order
        self.order: CollectiveOrder = CollectiveOrder(label, self.where, shared)
        self.services = Services(self)  # what runs beside the collectives
        self.faults = FaultState()
        self._forget_calls()
        self.idle_memory = IdleMemory()
        self.row_memory = RowMemory()
        self.fewest_cores = 1  # of a rank
        self.subsets = 0  # process sets of the job
        self.gpus: Sequence[Any] = ()  # of the ranks of the job
        self.gpu_options: tuple[str, bool] = ("host", False)  # and the path: how they are used
        self.gpu_path: Any = None
        self.tells_gpu_path = False  # whether it has been logged
        self.nccl: Any = None  # the ranks in NCCL, when they use it
        self.meets_once = True  # whether they launch what they know first, see `nccl_launch`
        self._warned = False
        self.node: Node | None = None  # shared memory of the ranks of this node, if there is any
        self._fence: MemoryFence | None = None
        self.halving_nbytes = 0  # up to here nodes halve arrays
        self.links_are_slow = False
        self._set_topology(Topology())
        if mpi is not None:
            self.connect((comm if comm is not None else mpi.COMM_WORLD).Dup())

    def _set_topology(self, topology: Topology) -> None:
        self.topology = topology
        self.world = topology.world
        self.rank, self.size = topology.rank, topology.size
        self.is_one_node = topology.is_one_node
        self.digests = DigestExchange(topology, self.node, self._decline)

    def connect(self, world: Any) -> None:
        """Joins the ranks of an MPI communicator, and of a node in shared memory. Collective."""
        self.node = None
        # Set at once: a rank that sees another die meanwhile revokes what there is.
        self.topology = topology = Topology(world)
        topology.discover(self.mpi)
        self._set_topology(topology)
        if self._job is None:
            self.ranks = range(topology.size)
        if any(len(ranks) > 1 for ranks in topology.nodes) and self.reduce != "mpi":
            self._join_node()
            self._set_topology(topology)
        self.halving_nbytes = halving_nbytes(len(topology.nodes))
        self.links_are_slow = self._measure_rate() < SLOW
        self.services.restart()

    def _measure_rate(self) -> float:
        topology, rate = self.topology, math.inf
        if self.node is None:
            one_each = len(topology.nodes) == topology.size
            return measure_rate(topology.world, self.mpi) if one_each else rate
        if topology.has_slice:
            rate = measure_rate(topology.across, self.mpi, topology.slices)
        if topology.is_one_node:
            return rate
        # The ranks of a node measure apart, but choose alike.
        return math.fsum(allgather(topology.local, rate)[: topology.slices])

    def disconnect(self) -> None:
        """Drops what these ranks share, as one of them has died; `connect` follows."""
        # MPI's communicators are not freed: that would need the rank that has died.
        self.services.detach()
        if self.nccl is not None:
            self.nccl.leave()
            self.nccl = None
        self.regions.clear()
        self._forget_calls()
        self.idle_memory = IdleMemory()
        self.row_memory = RowMemory()
        self.faults.joined = None

    def free(self) -> None:
        """Frees the communicator after its queued operations, and ends services. Collective."""
        self.order.close()
        if self.nccl is not None:
            self.nccl.close()
            self.nccl = None
        self.close_services()
        # The kernel frees their shared memory, unless results in it are still held.
        self._forget_calls()
        self.idle_memory.clear()
        self.row_memory.release()
        self.node = None
        if self._fence is not None:
            self._fence.free()
        for world in self.topology.mpi_communicators:
            try:
                world.Free()
            except self.mpi.Exception:
                if self.faults.retry is None:
                    raise  # otherwise a rank has died and its communicators are abandoned

    def _forget_calls(self) -> None:
        self.plans: dict[Any, Any] = {}  # of recent single calls, the oldest first
        self.fast_calls: dict[Any, Any] = {}  # short paths of recent single calls
        self.regions, self.results = RegionPool(), ResultPool()

    def watch(self, period: int, limit: int) -> None:
        """Starts the stall watchdog. Collective: every rank; blocks."""
        if self.size > 1 and (period or limit):
            self.services.start(lambda comm: StallWatchdog(comm.mpi, comm.world, period, limit))

    def close_services(self) -> None:
        self.services.close(wait=self.faults.retry is None)

    @property
    def job(self) -> "Communicator":
        """The communicator of all ranks of the job."""
        return self._job or self

    @property
    def lock(self) -> Any:
        """The context manager that a collective holds while it runs."""
        return self.order.lock

    def where(self) -> str:
        """Returns the place of this rank in the job for messages, such as `[rank 1 of 4]`."""
        return f"[rank {self.job.rank} of {self.job.size}]"

    def index_of_root(self, root: int) -> int:
        """Returns the index of a rank of the job among these ranks."""
        if isinstance(root, int | np.integer) and root in self.ranks:
            return self.ranks.index(root)
        ranks = f"this job, 0 to {self.size - 1}"
        if self.job is not self:
            ranks = f"the process set, one of {', '.join(map(str, self.ranks))}"
        raise errors.ArgumentError(
            self.where(),
            f"root_rank to be a rank of {ranks}",
            repr(root),
            f"Pass one of them; {self.ranks[0]} is the usual choice.",
        )

    def is_alive(self, rank: int) -> bool:
        """Returns whether a rank of the job is alive; ranks of other nodes count as alive."""
        return self.node is None or rank not in self.ranks_of_node(self.node.dead())

    def ranks_of_node(self, indices: Sequence[int]) -> list[int]:
        """Returns the ranks of the job that have some indices on this node."""
        return [self._neighbours[index] for index in indices]

    def allgather_bytes(self, payload: bytes | np.ndarray) -> list[np.ndarray]:
        """Sends bytes, of any number, to every rank. Collective: every rank; blocks."""
        mine = np.frombuffer(payload, np.uint8)
        if self.size == 1:
            return [mine]
        counts = np.zeros(self.size, np.int64)
        with blocked:
            self.world.Allgather(np.array([mine.size], np.int64), counts)
        ends = list(itertools.accumulate(counts.tolist(), initial=0))
        everything = np.zeros(ends[-1], np.uint8)
        allgather_parts(self.world, mine, everything, list(itertools.pairwise(ends)))
        return np.split(everything, ends[1:-1])

    def allgather_objects(self, value: Any) -> list[Any]:
        """Sends an object, pickled, to every rank. Collective: every rank; blocks."""
        return [pickle.loads(raw.tobytes()) for raw in self.allgather_bytes(as_message(value))]

    def _join_node(self) -> None:
        allgather_on_node = functools.partial(allgather, self.topology.local)
        self._neighbours = [self.ranks[index] for index in allgather_on_node(self.rank)]

        def error(indices: list[int]) -> errors.RankLostError:
            return lost(self.where(), self.ranks_of_node(indices))

        rank, size = self.topology.local_rank, self.topology.local_size
        if self._fence is None and not orders_stores():
            self._fence = MemoryFence(self.mpi)
        made = attach_node(rank, size, allgather_on_node, error, self._decline, self._fence)
        self.node = self._on_all(*made)

    def _decline(self) -> None:
        # A rank of a process set may still come to the others: the set has an order of its own.
        if self._job is None:
            decline(self.world, self.rank)

    def segment(self, nbytes: int, private_view: bool = False) -> Segment | None:
        """Makes memory of each node; `None`, with a warning, if a rank cannot. Collective."""
        return None if self.node is None else self._on_all(*self.node.segment(nbytes, private_view))

    def _on_all(self, made: M | None, reason: str | None) -> M | None:
        """Returns what all ranks have made; `None`, with a warning, if a rank has a reason."""
        reason = first_error(self.world, reason)
        if reason is None:
            return made
        self.warn_no_shared_memory(reason)
        return None

    def warn_no_shared_memory(self, reason: str) -> None:
        """Warns once, on rank 0, that data goes through MPI although ranks share a node."""
        remedy = TOO_MANY_FILES if isinstance(reason, TooManyFiles) else NO_ROOM
        if self.rank == 0 and not self._warned:
            _log.warning(
                "keras_dist sends data between the ranks of this node through MPI, which is "
                "slower than shared memory: %s. %s",
                reason,
                remedy,
            )
        self._warned = True


def subset(job: Communicator, ranks: Sequence[int]) -> Communicator:
    """Makes a communicator of some of the ranks. Collective: only those ranks; blocks."""
    if job.mpi is None:
        return Communicator(job=job, ranks=ranks)
    everyone = job.world.Get_group()
    group = everyone.Incl(ranks)
    comm = job.world.Create_group(group)
    made = Communicator(job.mpi, comm, job.reduce, job, ranks, job.reduction)
    comm.Free()
    group.Free()
    everyone.Free()
    return made


def ranks_of(job: Communicator, comm: Any) -> tuple[int, ...]:
    """Returns the ranks of a user's MPI communicator, ascending."""
    if job.mpi is None or comm == job.mpi.COMM_NULL:
        return ()
    ranks = ranks_in(job.world, comm)
    if job.mpi.UNDEFINED not in ranks:
        return tuple(sorted(ranks))
    raise errors.ArgumentError(
        "[keras_dist.ProcessSet]",
        "an MPI communicator of ranks of this job",
        f"one of {len(ranks)} processes, not all of which are",
        "Make it from the communicator that was passed to keras_dist.init, or from COMM_WORLD.",
    )
