"""Remote procedure calls between ranks: a server rank answers in a thread of its own.

A client sends integers and waits for arrays. Calls are not collective: a client that has left is
not waited for, and a server answers until all clients have left, at the latest at the end of the
job. Messages go through a duplicate of the communicator, and MPI must allow calls from several
threads at once. No thread blocks within MPI: the server sleeps between polls, and a client that
waits can see that the server has died.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.digests import NAP_SECONDS
from keras_dist._engine.mpi.library import failed_process
from keras_dist._engine.shm.wait import also_blocked, note

IDLE_SECONDS = 1e-3  # between polls for requests
TAGS = 3  # the request, the length of an error message, the answer

Answer = Callable[[np.ndarray], Sequence[np.ndarray]]


class RpcService:
    """A service that some ranks offer to others. Collective to make: every rank; blocks."""

    def __init__(
        self,
        comm: Communicator,
        servers: Sequence[int],
        answer: Answer,
        end: Callable[[], None],
    ):
        self._mpi, self._rank = comm.mpi, comm.rank
        self._world, number = comm.services.channel(comm.world)
        self._tag = TAGS * number
        self._server = servers[comm.rank]
        self._pair = sorted((comm.ranks[self._server], comm.ranks[comm.rank]))
        self._calling = threading.Lock()  # held during a call
        # Whether this client has left, and has told its server; a server has nobody to leave.
        self._left = self._has_told = self._server == comm.rank
        self._farewell: Any | None = None  # its request
        clients = [rank for rank, server in enumerate(servers) if server == comm.rank != rank]
        # Only the thread holds `answer` and its memory.
        self._thread = threading.Thread(
            target=self._serve, args=(clients, answer, end), name="keras_dist service", daemon=True
        )
        self._thread.start()
        comm.services.add_resource(self)

    def call(self, request: np.ndarray, targets: Sequence[np.ndarray]) -> None:
        """Sends a request and waits for the answer. Blocks; any thread may call.

        Args:
            request: int64 array of shape (count,), not empty.
        """
        try:
            with self._calling:
                if self._left:
                    raise errors.DataError("The job has ended; no rank answers any more.")
                note(self._pair, f"a request to rank {self._server}")
                with also_blocked():
                    self._call(request, targets)
        except self._mpi.Exception as failure:
            if failed_process(self._mpi, failure):
                raise errors.RankLostError(f"Rank {self._server} has died.") from failure
            raise
        finally:
            if self._left:
                self.leave()

    def leave(self) -> None:
        """Tells the server that this client has left. Does not block; a running call is answered.

        It waits for no lock, as the garbage collector may call it in any thread. During a call, the
        calling thread tells the server afterwards.
        """
        self._left = True
        if self._calling.acquire(blocking=False):
            try:
                self._notify_server()
            finally:
                self._calling.release()

    def close(self) -> None:
        """Leaves, and serves until all clients have left. Collective: every rank; blocks."""
        self._left = True
        with self._calling:  # no thread may call MPI after this
            self._notify_server()
        if self._farewell is not None:
            with self._ignoring_dead_ranks():
                _finish(self._farewell)
        self._thread.join()

    def _notify_server(self) -> None:
        if not self._has_told:
            self._has_told = True
            with self._ignoring_dead_ranks():
                self._farewell = self._world.Isend(np.empty(0, np.int64), self._server, self._tag)

    @contextlib.contextmanager
    def _ignoring_dead_ranks(self) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as failure:
            if not failed_process(self._mpi, failure):
                raise

    def _call(self, request: np.ndarray, targets: Sequence[np.ndarray]) -> None:
        world, server, tag = self._world, self._server, self._tag
        length = np.empty(1, np.int64)
        answer = world.Irecv(length, server, tag + 1)
        _finish(world.Isend(request, server, tag))
        _finish(answer, NAP_SECONDS)
        if length[0]:
            text = np.empty(length[0], np.uint8)
            _finish(world.Irecv(text, server, tag + 2))
            raise errors.DataError(text.tobytes().decode())
        for reception in [world.Irecv(_bytes(target), server, tag + 2) for target in targets]:
            _finish(reception)

    def _serve(self, ranks: list[int], answer: Answer, end: Callable[[], None]) -> None:
        try:
            self._serve_clients(ranks, answer)
        finally:
            end()

    def _serve_clients(self, ranks: list[int], answer: Answer) -> None:
        while ranks:
            found = False
            for rank in list(ranks):
                try:
                    status = self._mpi.Status()
                    message = self._world.Improbe(rank, self._tag, status)
                    if message is not None:
                        found = True
                        request = np.empty(status.Get_count(self._mpi.INT64_T), np.int64)
                        _finish(message.Irecv(request))
                        if not request.size:
                            ranks.remove(rank)
                        else:
                            self._reply(rank, request, answer)
                except self._mpi.Exception as failure:
                    if not failed_process(self._mpi, failure):
                        raise
                    ranks.remove(rank)
            if not found:
                time.sleep(IDLE_SECONDS)

    def _reply(self, rank: int, request: np.ndarray, answer: Answer) -> None:
        arrays: list[np.ndarray]
        try:
            length, arrays = 0, list(answer(request))
        except Exception as failure:  # the client raises it
            text = np.frombuffer(str(failure).encode(errors="replace") or b"unknown", np.uint8)
            length, arrays = text.size, [text]
        sends = [self._world.Isend(np.array([length]), rank, self._tag + 1)]
        sends += [self._world.Isend(_bytes(a), rank, self._tag + 2) for a in arrays]
        for send in sends:
            _finish(send)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _finish(request: Any, nap: float | None = None) -> None:
    """Waits for a request without counting the time: training does not wait for it."""
    while not request.Test():
        if nap is None:
            os.sched_yield()
        else:
            time.sleep(nap)
