"""Ranks that answer what other ranks ask them, in a thread of theirs, whatever else they do.

Who asks sends whole numbers and waits for arrays. Nothing of it is collective: a rank that asks no
more is not waited for, and one that serves does so until all have taken their leave, at the latest
at the end of the job. The messages go on a duplicate of the communicator of their own, and MPI must
allow calls from several threads at once. There is no waiting within MPI: a thread that looks for
questions sleeps in between, and who waits for an answer can see that the other has died.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.communicator import NAP_SECONDS, Communicator
from keras_dist._engine.mpi.library import failed_process
from keras_dist._engine.shm.wait import also_blocked, note

__all__ = ["RpcService"]

IDLE_SECONDS = 1e-3  # between two looks for questions
TAGS = 3  # a question, the size of what is wrong with the answer, the answer

Answer = Callable[[np.ndarray], Sequence[np.ndarray]]


class RpcService:
    """One of the things that ranks ask each other. Collective to make: every rank; blocks.

    Args:
        comm: the ranks.
        servers: for each rank, whom it asks; those who serve ask themselves, in vain.
        answer: takes a question, returns arrays; it is called in a thread of a rank that serves.
        end: called when nobody asks any more, in the same thread.
    """

    def __init__(
        self,
        comm: Communicator,
        servers: Sequence[int],
        answer: Answer,
        end: Callable[[], None],
    ):
        self._mpi, self._rank = comm.mpi, comm.rank
        if comm.aside is None:
            comm.aside = comm.world.Dup()
        self._world = comm.aside
        self._tag = TAGS * comm.services_made
        comm.services_made += 1
        self._server = servers[comm.rank]
        self._pair = sorted((comm.ranks[self._server], comm.ranks[comm.rank]))
        self._asks = threading.Lock()  # held while a question is on its way
        # Whether this rank asks no more, and has said so; who serves has nobody to leave.
        self._left = self._has_said_so = self._server == comm.rank
        self._farewell: Any | None = None  # on its way
        mine = [rank for rank, server in enumerate(servers) if server == comm.rank != rank]
        # It alone holds what answers and what that has in memory.
        self._thread = threading.Thread(
            target=self._serve, args=(mine, answer, end), name="keras_dist service", daemon=True
        )
        self._thread.start()
        comm.services.append(self)

    def ask(self, question: np.ndarray, targets: Sequence[np.ndarray]) -> None:
        """Sends a question and waits for the answer. Blocks; any thread may ask.

        Args:
            question: int64 array of shape (count,), of at least one number.
            targets: the arrays for the answer, written.

        Raises:
            RankLostError: who is asked has died.
            DataError: the answer is an error, which is told; or the job has ended.
        """
        try:
            with self._asks:
                if self._left:
                    text = "The ranks have left each other; nobody answers any more."
                    raise errors.DataError(text)
                note(self._pair, f"what rank {self._server} hands out")
                with also_blocked():
                    self._ask(question, targets)
        except self._mpi.Exception as failure:
            if failed_process(self._mpi, failure):
                raise errors.RankLostError(f"Rank {self._server} has died.") from failure
            raise
        finally:
            if self._left:
                self.leave()

    def leave(self) -> None:
        """Says that this rank asks no more. Does not block; a question on its way is answered.

        Waits for no lock: the garbage collector may call it, in whatever this thread is about.
        Where a question is on its way, who asks says it afterwards: behind it nothing is answered.
        """
        self._left = True
        if self._asks.acquire(blocking=False):
            try:
                self._say_so()
            finally:
                self._asks.release()

    def close(self) -> None:
        """Takes leave, and serves until all others have done so. Collective; blocks."""
        self._left = True
        with self._asks:  # the thread of a question is not to speak to MPI when it ends
            self._say_so()
        if self._farewell is not None:
            with self._the_dead_left_alone():
                _finish(self._farewell)
        self._thread.join()

    def _say_so(self) -> None:
        if not self._has_said_so:
            self._has_said_so = True
            with self._the_dead_left_alone():
                self._farewell = self._world.Isend(np.empty(0, np.int64), self._server, self._tag)

    @contextlib.contextmanager
    def _the_dead_left_alone(self) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as failure:
            if not failed_process(self._mpi, failure):
                raise

    def _ask(self, question: np.ndarray, targets: Sequence[np.ndarray]) -> None:
        world, server, tag = self._world, self._server, self._tag
        wrong = np.empty(1, np.int64)
        answer = world.Irecv(wrong, server, tag + 1)
        _finish(world.Isend(question, server, tag))
        _finish(answer, NAP_SECONDS)
        if wrong[0]:
            text = np.empty(wrong[0], np.uint8)
            _finish(world.Irecv(text, server, tag + 2))
            raise errors.DataError(text.tobytes().decode())
        for request in [world.Irecv(_bytes(target), server, tag + 2) for target in targets]:
            _finish(request)

    def _serve(self, ranks: list[int], answer: Answer, end: Callable[[], None]) -> None:
        try:
            self._serve_until_all_have_left(ranks, answer)
        finally:
            end()

    def _serve_until_all_have_left(self, ranks: list[int], answer: Answer) -> None:
        while ranks:
            asked = False
            for rank in list(ranks):
                try:
                    status = self._mpi.Status()
                    message = self._world.Improbe(rank, self._tag, status)
                    if message is not None:
                        asked = True
                        question = np.empty(status.Get_count(self._mpi.INT64_T), np.int64)
                        _finish(message.Irecv(question))
                        if not question.size:
                            ranks.remove(rank)
                        else:
                            self._reply(rank, question, answer)
                except self._mpi.Exception as failure:
                    if not failed_process(self._mpi, failure):
                        raise
                    ranks.remove(rank)
            if not asked:
                time.sleep(IDLE_SECONDS)

    def _reply(self, rank: int, question: np.ndarray, answer: Answer) -> None:
        arrays: list[np.ndarray]
        try:
            wrong, arrays = 0, list(answer(question))
        except Exception as failure:  # it is who asked that must hear of it
            text = np.frombuffer(str(failure).encode(errors="replace") or b"unknown", np.uint8)
            wrong, arrays = text.size, [text]
        requests = [self._world.Isend(np.array([wrong]), rank, self._tag + 1)]
        requests += [self._world.Isend(_bytes(a), rank, self._tag + 2) for a in arrays]
        for request in requests:
            _finish(request)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _finish(request: Any, nap: float | None = None) -> None:
    """Waits for data as `transfer.wait` does, but uncounted: training does not wait for it."""
    while not request.Test():
        if nap is None:
            os.sched_yield()
        else:
            time.sleep(nap)
