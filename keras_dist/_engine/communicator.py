"""The ranks of the job and the ways bytes travel between them. Knows MPI, no framework.

A `Communicator` is a private duplicate of the world or of the user's communicator, so that
no message of ours can meet one of the user's. It also holds the node communicator (ranks
that share memory) and, from it, the place of this rank among the nodes. A communicator of
some of the ranks is made by `subsets`; it is like the others, but knows the job it is part of.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from keras_dist import errors
from keras_dist._engine.background_services import BackgroundService, BackgroundServices
from keras_dist._engine.collectives.pending import let_earlier_end
from keras_dist._engine.collectives.queue import CollectiveQueue
from keras_dist._engine.collectives.signature import JoinedRanks
from keras_dist._engine.collectives.ticket import Handle, NameInFlightError, in_flight
from keras_dist._engine.faults.rank_lost import lost
from keras_dist._engine.faults.stall_watchdog import StallWatchdog
from keras_dist._engine.hello import turn_away
from keras_dist._engine.mpi.transfer import allgather_parts
from keras_dist._engine.shm.idle_memory import IdleMemory
from keras_dist._engine.shm.node import Node, join_node
from keras_dist._engine.shm.wait import blocked, waiting
from keras_dist._engine.tracing import spans

__all__ = ["Communicator"]

SPIN_SECONDS = 100e-6  # poll this long before giving the core away
NAP_SECONDS = 50e-6

_log = logging.getLogger("keras_dist")
R = TypeVar("R")


class Communicator:
    """The ranks that train together.

    Args:
        mpi: mpi4py's `MPI` module; `None` for one process without MPI.
        comm: the communicator to duplicate; `None` for the world.
        reduce: how ranks of a node reduce: `"copy"`, `"read"` or `"mpi"`.
        job: the communicator of all ranks of the job; `None` when it is this one.
        ranks: what the ranks are called there, ascending. Defaults to 0, 1, 2, ...
    """

    def __init__(
        self,
        mpi: Any | None = None,
        comm: Any | None = None,
        reduce: str = "copy",
        job: "Communicator | None" = None,
        ranks: Sequence[int] | None = None,
    ):
        self.mpi: Any = mpi
        self.reduce = reduce
        self._job = job
        # One collective at a time: TensorFlow may call from any of its threads.
        # Where MPI itself may be called by one thread at a time, all ranks' lock is that of a set.
        self.may_thread = mpi is None or mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        self._stands_in = None if self.may_thread else job
        self._lock: Any = threading.RLock()
        self._line: CollectiveQueue | None = None  # takes the lock's place once something is queued
        self._explained = False
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1
        self.cross_rank, self.cross_size = 0, 1
        self.is_homogeneous = True
        self.nodes: list[list[int]] = []  # the ranks of each node, where all have as many
        self.bucket_nbytes: int | None = None  # what has been measured on these ranks
        self.fewest_cores = 1  # of the cores of the ranks, those of the rank that has fewest
        self.mismatch: str | None = None  # the text of the last MismatchError
        self.absence: JoinedRanks | None = None  # while some of the ranks have no more data
        self.when_missed: Callable[[], None] | None = None  # called where others miss them
        self.node: Node | None = None
        self._attendants: BackgroundServices[Communicator] = BackgroundServices()
        self._neighbours: list[int] = []  # the ranks of this node
        self.first_here = 0  # the place here of the first rank of this node
        self.plans: dict[Any, Any] = {}  # of recent single calls, oldest first
        self.idle_memory = IdleMemory()
        self.ranks: Sequence[int] = ranks or (0,)
        self.recovery: Any = None  # a `Recovery` where ranks go on without those that die
        self.losses = 0  # how many ranks have died so far
        self.subsets = 0  # how many process sets there are, this rank in them or not
        self.meetings = 0  # how many there were, equal on all ranks
        self._lane: spans.Lane | None = None
        self.aside: Any | None = None  # a duplicate for what threads say to each other
        self.services: list[Any] = []  # what is closed when all ranks come to the end
        self.services_made = 0  # as many on all ranks
        if mpi is not None:
            self.settle((comm if comm is not None else mpi.COMM_WORLD).Dup())

    def settle(self, world: Any) -> None:
        """Finds the place of this rank among others, and what they share. Collective; blocks.

        Args:
            world: an MPI communicator for this one alone.
        """
        mpi = self.mpi
        self.world = world
        self.node = None
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        if self._job is None:
            self.ranks = range(self.size)
        self._local = self.world.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = self._local.Get_rank(), self._local.Get_size()
        self.first_here = self._local.bcast(self.rank)
        # The ranks of the same local rank, one on each node: they share out a slice.
        self.across = self.world.Split(color=self.local_rank, key=self.rank)
        self.cross_rank, self.cross_size = self.across.Get_rank(), self.across.Get_size()
        places = self.world.allgather((self.local_size, self.cross_rank, self.local_rank))
        self.is_homogeneous = len({local_size for local_size, _, _ in places}) == 1
        self.nodes = []
        if self.is_homogeneous:
            order = sorted(range(self.size), key=lambda rank: places[rank][1:])
            self.nodes = [
                order[first : first + self.local_size]
                for first in range(0, self.size, self.local_size)
            ]
        # Nodes of different sizes would cut a bucket into different slices.
        if self.local_size > 1 and self.is_homogeneous and self.reduce != "mpi":
            self._join_node(read=self.reduce == "read")
        self._attendants.begin_again(self)

    @property
    def worlds(self) -> tuple[Any, ...]:
        """The MPI communicators behind this one."""
        return self.across, self._local, self.world

    def forget(self) -> None:
        """Lets go of what these ranks have in common, as one of them has died."""
        self._attendants.be_alone()
        # MPI's communicators are left as they are: to free them would take the dead as well.
        self.plans.clear()
        self.idle_memory = IdleMemory()
        self.absence = None
        self.aside = None

    @property
    def job(self) -> "Communicator":
        """The communicator of all ranks of the job."""
        return self._job or self

    @property
    def _one_at_a_time(self) -> "Communicator":
        """Whose line collectives of this one stand in."""
        return self._stands_in or self

    @property
    def lock(self) -> Any:
        """What a collective holds while it runs."""
        let_earlier_end()
        lock, recorder = self._one_at_a_time._lock, spans.recorder
        return lock if recorder is None else spans.held(lock, self._lane_of(recorder))

    def _lane_of(self, recorder: spans.Recorder) -> spans.Lane:
        if self._lane is None or self._lane.recorder is not recorder:
            ranks = "" if self._job is None else f" of ranks {', '.join(map(str, self.ranks))}"
            self._lane = spans.Lane(f"communication{ranks}", recorder)
        return self._lane

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.local_size == self.size

    def free(self) -> None:
        """Gives the duplicate back. Collective: every rank must call it.

        What is queued runs first, and the thread that runs it ends, as do the attendants.
        """
        if self._line is not None:
            self._line.close()
        self.close_services()
        self.dismiss()
        # Their shared memory is the kernel's again, unless somebody holds results in it.
        self.plans.clear()
        self.idle_memory.clear()
        self.node = None
        if self.mpi is not None:
            for world in filter(None, (self.aside, *self.worlds)):
                try:
                    world.Free()
                except self.mpi.Exception:
                    if self.recovery is None:
                        raise  # else a rank has died, and nobody needs it any more

    def attend(self, begin: "Callable[[Communicator], BackgroundService]") -> None:
        """Lets something go on beside the ranks until they part. Collective: every rank; blocks.

        Args:
            begin: begins it, and does so again among the others where a rank has died.
        """
        self._attendants.add(self, begin)

    def watch(self, period: int, limit: int) -> None:
        """Begins to watch for ranks that do not come. Collective: every rank; blocks.

        Args:
            period: seconds of waiting after which the root says so, again and again; 0: never.
            limit: seconds of waiting after which the job ends; 0: never.
        """
        if self.size > 1 and (period or limit):
            self.attend(lambda comm: StallWatchdog(comm.mpi, comm.world, period, limit))

    def dismiss(self) -> None:
        """Ends what attends. Collective: every rank; blocks."""
        if self.recovery is None:
            self._attendants.close()
        else:
            self._attendants.abandon()  # a last meeting would wait for ranks that die now

    def close_services(self) -> None:
        """Closes what ranks do for each other behind the script's back. Collective; blocks."""
        for service in list(self.services):  # files take themselves off
            service.close()
        self.services.clear()

    def queue(self, work: Callable[[], Any], what: str, name: str | None = None) -> Handle:
        """Queues a collective; a thread runs it in its turn. Blocks for `wait_first` alone.

        Collectives that are called or queued later, from any thread, run after it.

        Args:
            work: calls the collective.
            what: what it is called in messages.
            name: what the user calls it, if anything: by it the ranks may run it earlier.

        Raises:
            ArgumentError: another operation of that name is in flight.
        """
        if self._one_at_a_time is not self:
            return self._one_at_a_time.queue(work, what)
        let_earlier_end()
        try:
            return self._make_line().queue(spans.queued(work), what, name)
        except NameInFlightError as refused:
            raise self._in_flight(refused) from None

    def run_by_name(self, work: Callable[[], R], name: str) -> R:
        """Runs a collective that ranks find by its name among those that are called or queued.

        Collective: every rank; blocks.

        Args:
            work: calls the collective, which begins with a meeting.
            name: what the user calls it.

        Raises:
            ArgumentError: another operation of that name is in flight.
        """
        if self.size == 1 or self._one_at_a_time is not self:
            return work()
        let_earlier_end()
        try:
            return self._make_line().run(work, name)
        except NameInFlightError as refused:
            raise self._in_flight(refused) from None

    @property
    def refused(self) -> frozenset[str]:
        """The names of operations that were refused since the ranks met; see `refusals`."""
        return self._line.refused if self._line is not None else frozenset()

    def forget_refused(self, name: str) -> None:
        """Forgets a name that was refused."""
        if self._line is not None:
            self._line.forget_refused(name)

    def _in_flight(self, refused: NameInFlightError) -> errors.ArgumentError:
        return errors.ArgumentError(in_flight(self.where(), str(refused)))

    def standing(self) -> tuple[tuple[str, ...], bool]:
        """Returns the names of what is called or queued, and whether any of it is waited for."""
        return self._line.standing() if self._line is not None else ((), False)

    def _make_line(self) -> CollectiveQueue:
        if self._line is None:
            with self._lock:  # of two threads that come here one makes the line
                if self._line is None:
                    self._lock = self._line = CollectiveQueue(self._lock)
        return self._line

    def finish_queued(self) -> None:
        """Waits until what is queued has run; logs the errors nobody has asked for."""
        let_earlier_end()
        line = self._one_at_a_time._line
        if line is not None:
            line.drain()

    def _join_node(self, read: bool) -> None:
        share = functools.partial(_share, self._local)
        self._neighbours = [self.ranks[place] for place in share(self.rank)]

        def error(places: list[int]) -> errors.RankLostError:
            return lost(self.where(), [self._neighbours[place] for place in places])

        node, trouble = join_node(
            self.local_rank, self.local_size, share, read, error, self._turn_away
        )
        trouble = self.first_trouble(trouble)
        if trouble is None and node is not None:
            # Or a rank would ask whether its partners on other nodes could read, and they not.
            node.may_read = all(self.world.allgather(node.may_read))
            self.node = node
        else:
            self.explain_no_shared_memory(trouble)

    def _turn_away(self) -> None:
        # In a process set others may wait for this rank and be right to: it has a line of its own.
        if self._job is None:
            turn_away(self.world, self.rank)

    def lives(self, rank: int) -> bool:
        """Tells whether a rank of the job lives, as far as is seen on this node."""
        return self.node is None or rank not in [self._neighbours[p] for p in self.node.dead()]

    def first_trouble(self, trouble: str | None) -> str | None:
        """Returns what went wrong on the first rank on which something did. Collective."""
        troubles = _share(self.world, trouble)
        return next((text for text in troubles if text is not None), None)

    def explain_no_shared_memory(self, reason: str | None) -> None:
        """Says once, on rank 0, why data goes through MPI although ranks share a node."""
        if self.rank == 0 and not self._explained:
            _log.warning(
                "keras_dist sends data between the ranks of this node through MPI, which is "
                "slower than shared memory: %s. A container gets more by --shm-size=1g "
                "(Docker, Podman) or --bind /dev/shm (Apptainer).",
                reason,
            )
        self._explained = True

    def where(self) -> str:
        """Returns the place of this rank in the job for messages, such as `[rank 1 of 4]`."""
        return f"[rank {self.job.rank} of {self.job.size}]"

    def place_of_root(self, root: int) -> int:
        """Returns the place of a rank of the job among these ranks.

        Raises:
            ArgumentError: it is none of them.
        """
        if isinstance(root, int | np.integer) and root in self.ranks:
            return self.ranks.index(root)
        ranks = f"this job, 0 to {self.size - 1}"
        if self.job is not self:
            ranks = f"the process set, one of {', '.join(map(str, self.ranks))}"
        raise errors.ArgumentError(
            errors.explain(
                self.where(),
                f"root_rank to be a rank of {ranks}",
                repr(root),
                f"Pass one of them; {self.ranks[0]} is the usual choice.",
            )
        )

    def allgather_bytes(self, payload: bytes | np.ndarray) -> list[np.ndarray]:
        """Sends bytes, as many as this rank likes, to every rank.

        Args:
            payload: this rank's bytes.

        Returns:
            One uint8 array a rank, in rank order.
        """
        mine = np.frombuffer(payload, np.uint8)
        if self.size == 1:
            return [mine]
        counts = np.zeros(self.size, np.int64)
        with blocked:
            self.world.Allgather(np.array([mine.size], np.int64), counts)
        everything = np.zeros(int(counts.sum()), np.uint8)
        allgather_parts(self.world, mine, everything, counts)
        return np.split(everything, np.cumsum(counts)[:-1])

    def agree(self, digest: bytes) -> bool:
        """Waits until every rank has come, and compares what they have come for.

        The wait is polite: a short spin, then sleep. A rank that comes early leaves its
        core to whoever is still computing.

        Args:
            digest: 16 bytes.

        Returns:
            Whether all ranks have brought the same digest; the answer is the same on all.
        """
        if self.node is not None and self.is_one_node:
            self.meetings += 1
            return self.node.meet(digest)
        answer = self.come(digest)
        with waiting:
            start = time.perf_counter()
            while (same := answer()) is None:
                if time.perf_counter() - start > SPIN_SECONDS:
                    time.sleep(NAP_SECONDS)
        return same

    def come(self, digest: bytes) -> Callable[[], bool | None]:
        """Comes to a meeting as `agree` does, and does not wait for it.

        Args:
            digest: 16 bytes.

        Returns:
            What tells the answer of `agree`; `None` as long as a rank is missing.
        """
        self.meetings += 1
        if self.node is not None and self.is_one_node:
            return self.node.come(digest)
        mine = np.frombuffer(digest, np.uint8)
        digests = np.empty((self.size, mine.size), np.uint8)
        request = self.world.Iallgather(mine, digests)

        def answer() -> bool | None:
            if request.Test():
                return bool((digests == digests[0]).all())
            self._turn_away()
            return None

        return answer


def _share(comm: Any, value: Any) -> list[Any]:
    with blocked:
        return comm.allgather(value)
