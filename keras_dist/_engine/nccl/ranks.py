"""The ranks of a communicator in NCCL: made at the first use, aborted when a rank dies."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.faults.rank_state import lost
from keras_dist._engine.nccl.launches import Launch, LaunchWatch, poll
from keras_dist._engine.recovery import sees_dead_ranks
from keras_dist._engine.shm.wait import also_blocked, note
from keras_dist._engine.sideband import Mailbox
from keras_dist._gpu import (
    REDUCTIONS,
    DeviceArray,
    Nccl,
    NcclError,
    Runtime,
    load_nccl,
    load_runtime,
)

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator

Copies = tuple[Sequence[tuple[int, int, int]], Sequence[tuple[int, int, int]]]


class FailedElsewhere(Exception):
    """Another rank has failed before its launch."""

    def __init__(self, error: errors.RankError):
        super().__init__(str(error))
        self.error = error


class NcclRanks:
    """NCCL's communicator of some ranks, and its stream. Collective to make; blocks."""

    _nccl: Nccl
    _runtime: Runtime

    def __init__(self, comm: "Communicator"):
        self._comm, self._handle, self._stream = comm, 0, 0
        self._turn = threading.Lock()  # held while the communicator may end
        self._factors: dict[tuple[float, np.dtype], int] = {}
        self._failure: Exception | None = None
        self._watch: LaunchWatch | None = None
        self.launched = 0  # since the ranks last met: maybe not the same on all
        self.known: set[bytes] = set()  # digests of operations that all ranks have launched
        self.step: tuple[Any, int] | None = None  # the plan that is launched, and its next bucket
        self._last: Launch | None = None
        self._agreed: Launch | None = None  # the last one that is known to be the same on all
        self._failures = Mailbox(comm.world)  # of ranks that fail before their launch

    def connect(self, explain: Callable[[Exception], errors.RankError]) -> None:
        """Connects the ranks in NCCL at the first call. Collective: every rank; blocks."""
        if self._watch is not None:
            return
        unique_id = self._prepare(explain)
        self._watch = LaunchWatch(self._runtime.use, self._check, self.abort)
        self._handle = self._nccl.init(self._comm.size, unique_id, self._comm.rank)
        self._settle()

    def agree(self) -> None:
        """Records that all ranks have met, after the same number of launches."""
        self.launched, self._agreed = 0, self._last

    def tell(self, error: errors.RankError) -> None:
        """Tells all ranks that this one has failed before its launch. Does not block."""
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._failures.post(rank, error)

    def launch(
        self,
        what: Any,
        inputs: Sequence[DeviceArray],
        outputs: Sequence[DeviceArray],
        group: Callable[[], None],
        copies: Copies = ((), ()),
    ) -> Launch:
        """Launches operations after the work that writes their arrays. Collective; does not wait.

        `copies` are those before and those after them: target, source and number of bytes.
        """
        self._runtime.use()
        for array in (*inputs, *outputs):
            array.hold(self._stream)
        self._raise_failure()
        try:
            for copy in copies[0]:
                self._runtime.copy(*copy, self._stream)
            self._nccl.start()
            group()
            self._nccl.end()
            self._settle()
            for copy in copies[1]:
                self._runtime.copy(*copy, self._stream)
        except NcclError:
            self._raise_failure()  # the watch may have aborted the communicator meanwhile
            self._check_ranks()
            raise
        event = self._runtime.event(self._stream)
        launch = Launch(event, self._comm.ranks, what, (*inputs, *outputs))
        for array in outputs:
            array.completion = launch
        if self._watch is not None:
            self._watch.add(launch)
        self._last = launch
        return launch

    def code_of(self, op: ReduceOp, factor: float, dtype: np.dtype) -> int:
        """Returns NCCL's code of a reduction with a factor. Called before `launch`."""
        if factor == 1:
            return REDUCTIONS[op.name.lower()]
        if op is ReduceOp.AVERAGE:
            factor /= self._comm.size
        key = factor, dtype
        if key not in self._factors:
            self._factors[key] = self._nccl.new_factor(factor, dtype, self._handle)
            self._settle()
        return self._factors[key]

    def allreduce(self, source: DeviceArray, target: DeviceArray, code: int) -> None:
        self._nccl.allreduce(source, target, code, self._handle, self._stream)

    def reduce_rows(
        self, source: DeviceArray, target: DeviceArray, bounds: Sequence[int], code: int
    ) -> None:
        """Reduces the rows of each rank into its target. Called by the group of `launch`."""
        width = source.count // max(1, source.shape[0])
        for root, (low, high) in enumerate(itertools.pairwise(bounds)):
            rows = source.section(low * width, high * width)
            self._nccl.reduce(rows, target, code, root, self._handle, self._stream)

    def broadcast(self, source: int, target: int, nbytes: int, root: int) -> None:
        """Copies bytes of the root, an index. Called by the group of `launch`."""
        self._nccl.broadcast(source, target, nbytes, root, self._handle, self._stream)

    def copy(self, arrays: Sequence[DeviceArray], copies: Sequence[DeviceArray]) -> None:
        """Copies arrays that have been written. Blocks until the copies are made."""
        for array, copy in zip(arrays, copies, strict=True):
            copy.hold(self._stream)
            self._runtime.copy(copy.address, array.address, array.nbytes, self._stream)
        # Nobody else may get the memory of a copy that is dropped before it has been written.
        self._runtime.event(self._stream).wait()

    def abort(self, failure: Exception) -> None:
        """Ends the communicator and its operations, without the other ranks."""
        with self._turn:
            self._failure = self._failure or failure
            handle, self._handle = self._handle, 0
            if handle:
                self._nccl.abort(handle)

    def leave(self) -> None:
        """Aborts the communicator after the death of a rank, and ends its thread."""
        self._end(self._lost())

    def give_up(self, failure: Exception) -> None:
        """Aborts the communicator after a failure that all ranks know. Collective; blocks."""
        earlier = self._agreed
        try:
            intact = self._comm.allgather_bytes(bytes([self._failure is None]))
            # Launches on which the ranks agreed end first. If NCCL has failed on a rank, they may
            # never end.
            if earlier is not None and all(part[0] for part in intact):
                with contextlib.suppress(Exception):  # those who wait for it raise its error
                    earlier.wait()
            self._close_failures()  # all ranks have come here before one of them aborts
        finally:
            self._end(failure)

    def close(self) -> None:
        """Ends the communicator when its operations have ended. Collective; blocks."""
        if self._watch is not None:
            self._watch.drain()
            self._watch.close()
        with self._turn:
            handle, self._handle = self._handle, 0
            if handle:
                self._runtime.use()
                for op in self._factors.values():
                    self._nccl.free_factor(op, handle)
                self._nccl.destroy(handle)
        self._free_stream()
        if self._comm.faults.retry is None:  # otherwise a rank may have died meanwhile
            self._close_failures()

    def _end(self, failure: Exception) -> None:
        if self._watch is not None:
            self._watch.fail(failure)
        self.abort(failure)
        if self._watch is not None:
            self._watch.close()
        self._free_stream()

    def _free_stream(self) -> None:
        stream, self._stream = self._stream, 0
        if stream:
            self._runtime.free_stream(stream)

    def _close_failures(self) -> None:
        note(self._comm.ranks, "the end of NCCL's communicator")
        with also_blocked():
            self._failures.close(self._check_ranks)

    def _prepare(self, explain: Callable[[Exception], errors.RankError]) -> bytes:
        """Loads the libraries and makes a stream; returns the unique id. Collective; blocks."""
        mine: Any = b""
        failure: Exception | None = None
        # Rank 0 sends the id. Any rank may send an error.
        try:
            self._load()
            if not self._comm.rank:
                mine = self._nccl.unique_id()
        except Exception as error:  # every rank takes part in the exchange, whatever happens
            failure, mine = error, explain(error)
        told = self._comm.allgather_objects(mine)
        if failure is not None:
            raise failure
        for part in told:
            if isinstance(part, errors.RankError):
                raise FailedElsewhere(part)
        return bytes(told[0])

    def _load(self) -> None:
        nccl, runtime = load_nccl(), load_runtime()
        if runtime is None or not isinstance(nccl, Nccl):  # `path_of` has found them
            raise errors.BackendError(f"{self._comm.where()} NCCL is gone: {nccl}")
        self._nccl, self._runtime = nccl, runtime
        runtime.use()
        self._stream = runtime.new_stream()

    def _settle(self) -> None:
        """Waits until the last call has been done: the first ones connect the ranks."""
        with also_blocked():
            poll(self._is_settled, self._check_others)

    def _is_settled(self) -> bool:
        with self._turn:
            self._raise_failure()
            return self._nccl.settled(self._handle)

    def _check(self) -> None:
        self._check_ranks()
        with self._turn:
            if self._handle:
                self._nccl.settled(self._handle)

    def _check_others(self) -> None:
        self._check_ranks()
        for error in self._failures.receive():
            raise FailedElsewhere(error)

    def _check_ranks(self) -> None:
        comm = self._comm
        if comm.node is not None and (dead := comm.node.dead()):
            raise lost(comm.where(), comm.ranks_of_node(dead))
        if comm.faults.retry is not None and comm.thread_multiple:
            with contextlib.suppress(comm.mpi.Exception):
                if sees_dead_ranks(comm.world):
                    raise self._lost()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _lost(self) -> errors.RankLostError:
        where, remedy = self._comm.where(), "See the last output of the ranks."
        return errors.RankLostError(where, "all ranks to be alive", "a rank that has died", remedy)


def nccl_of(comm: "Communicator") -> NcclRanks:
    """Returns the ranks in NCCL; `connect` follows. Collective at the first call; blocks."""
    if comm.nccl is None:
        comm.nccl = NcclRanks(comm)
    return comm.nccl


def abandon(comm: "Communicator", failure: Exception) -> None:
    """Ends the operations on which the ranks have turned out not to agree. Collective; blocks."""
    ranks, comm.nccl, comm.meets_once = comm.nccl, None, False
    if ranks is not None:
        ranks.give_up(failure)
