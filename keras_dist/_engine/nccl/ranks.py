"""The ranks of a communicator in NCCL: made at the first use, aborted when a rank dies."""

import contextlib
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.faults.rank_lost import lost
from keras_dist._engine.messages import as_message
from keras_dist._engine.nccl.launches import Launch, LaunchWatch, poll
from keras_dist._engine.recovery.ulfm import sees_dead_ranks
from keras_dist._engine.shm.wait import also_blocked
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

__all__ = ["NcclRanks", "nccl_of"]


def nccl_of(comm: "Communicator") -> "NcclRanks":
    """Returns NCCL's communicator of the ranks. Collective at the first call; blocks.

    Raises:
        NcclError: NCCL cannot connect them.
        RankLostError: a rank has died.
    """
    if comm.nccl is None:
        comm.nccl = NcclRanks(comm)
    ranks: NcclRanks = comm.nccl
    return ranks


class NcclRanks:
    """NCCL's communicator of some ranks, and its stream. Collective to make; blocks.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: "Communicator"):
        nccl, runtime = load_nccl(), load_runtime()
        if runtime is None or not isinstance(nccl, Nccl):  # `path_of` has found them
            raise errors.BackendError(f"{comm.where()} NCCL is gone: {nccl}")
        self._nccl: Nccl = nccl
        self._runtime: Runtime = runtime
        self._comm, self._handle = comm, 0
        self._turn = threading.Lock()  # held while the communicator may end
        self._factors: dict[tuple[float, np.dtype], int] = {}
        unique_id = self._share_id()
        runtime.use()
        self._stream = runtime.new_stream()
        self._failure: Exception | None = None
        self._watch = LaunchWatch(runtime.use, self._check, self.abort)
        self._handle = nccl.init(comm.size, unique_id, comm.rank)
        self._settle()

    def launch(
        self,
        what: Any,
        inputs: Sequence[DeviceArray],
        outputs: Sequence[DeviceArray],
        group: Callable[[], None],
    ) -> Launch:
        """Launches operations at once, after the work that writes their arrays. Does not wait.

        Collective: every rank, with operations on which all have agreed.

        Args:
            what: the operations; `str` describes them.
            inputs: arrays that are read.
            outputs: arrays that are written; their `completion` is set.
            group: calls the operations.
        """
        self._runtime.use()
        for array in (*inputs, *outputs):
            array.hold(self._stream)
        self._raise_failure()
        try:
            self._nccl.start()
            group()
            self._nccl.end()
            self._settle()
        except NcclError:
            self._raise_failure()  # the watch may have aborted the communicator meanwhile
            self._check_ranks()
            raise
        event = self._runtime.event(self._stream)
        launch = Launch(event, self._comm.ranks, what, (*inputs, *outputs))
        for array in outputs:
            array.completion = launch
        self._watch.add(launch)
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
        """Reduces an array; `code` is that of `code_of`. Called by the group of `launch`."""
        self._nccl.allreduce(
            source.address,
            target.address,
            source.count,
            source.dtype,
            code,
            self._handle,
            self._stream,
        )

    def reduce_rows(
        self, source: DeviceArray, target: DeviceArray, bounds: Sequence[int], code: int
    ) -> None:
        """Reduces the rows of each rank into its target. Called by the group of `launch`."""
        width = source.count // max(1, source.shape[0])
        for root in range(self._comm.size):
            low, high = int(bounds[root]), int(bounds[root + 1])
            self._nccl.reduce(
                source.address + low * width * source.dtype.itemsize,
                target.address,
                (high - low) * width,
                source.dtype,
                code,
                root,
                self._handle,
                self._stream,
            )

    def broadcast(self, source: int, target: int, nbytes: int, root: int) -> None:
        """Copies bytes of the root, an index. Called by the group of `launch`."""
        self._nccl.broadcast(source, target, nbytes, root, self._handle, self._stream)

    def copies_of(self, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Returns copies of arrays that have been written. Blocks until they are made."""
        made = [array.empty() for array in arrays]
        for array, copy in zip(arrays, made, strict=True):
            copy.hold(self._stream)
            self._runtime.copy(copy.address, array.address, array.nbytes, self._stream)
        # Nobody else may get the memory of a copy that is dropped before it has been written.
        self._runtime.event(self._stream).wait()
        return made

    def abort(self, failure: Exception) -> None:
        """Ends the communicator and its operations, without the other ranks.

        Args:
            failure: the reason, which later operations raise.
        """
        with self._turn:
            self._failure = self._failure or failure
            handle, self._handle = self._handle, 0
            if handle:
                self._nccl.abort(handle)

    def leave(self) -> None:
        """Aborts the communicator after the death of a rank, and ends its thread."""
        failure = self._lost()
        self._watch.fail(failure)
        self.abort(failure)
        self._watch.close()
        self._runtime.free_stream(self._stream)

    def close(self) -> None:
        """Ends the communicator when its operations have ended. Collective; blocks."""
        self._watch.drain()
        self._watch.close()
        with self._turn:
            handle, self._handle = self._handle, 0
            if handle:
                self._runtime.use()
                for op in self._factors.values():
                    self._nccl.free_factor(op, handle)
                self._nccl.destroy(handle)
        self._runtime.free_stream(self._stream)

    def _share_id(self) -> bytes:
        """Returns the unique id that the first rank has made. Collective; blocks."""
        mine: Any = b""
        # All ranks call this; the first one has something to say.
        if not self._comm.rank:
            try:
                mine = self._nccl.unique_id()
            except errors.BackendError as error:
                mine = error
        parts = self._comm.allgather_bytes(as_message(mine))
        told = pickle.loads(parts[0].tobytes())
        if isinstance(told, Exception):
            raise told
        return bytes(told)

    def _settle(self) -> None:
        """Waits until the last call has been done: the first ones connect the ranks."""
        with also_blocked():
            poll(self._is_settled, self._check_ranks)

    def _is_settled(self) -> bool:
        with self._turn:
            self._raise_failure()
            return self._nccl.settled(self._handle)

    def _check(self) -> None:
        """Raises if an operation will not end."""
        self._check_ranks()
        with self._turn:
            if self._handle:
                self._nccl.settled(self._handle)

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
        return errors.RankLostError(
            errors.explain(where, "all ranks to be alive", "a rank that has died", remedy)
        )
