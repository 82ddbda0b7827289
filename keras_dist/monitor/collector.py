"""How reports of all ranks come to the root: it asks for them when somebody wants to see them.

A thread of every rank looks now and then into its mailbox. As long as nobody watches, no message
is sent, and nothing of this takes part in training. A rank that does not answer, stopped or
gone, is shown with the age of its last report, and asked once.
"""

import functools
import logging
import os
import sys
import threading
import time

from keras_dist import _engine
from keras_dist.monitor.job import Job, Row
from keras_dist.monitor.report import Report, of_this_rank, take_sample

__all__ = ["Collector"]

POLL_SECONDS = 0.5
BUSY_SECONDS = 0.05  # of the root, while answers are on their way
FRESH_SECONDS = 0.5  # a report that is no older need not be asked for again
PATIENCE_SECONDS = 2.0  # with ranks that do not answer
CANNOT_ASK = (
    "rank 0 cannot ask the others: this MPI allows calls from one thread at a time "
    "(below MPI_THREAD_MULTIPLE)"
)

_log = logging.getLogger("keras_dist")


class Collector:
    """The gathering of reports, on this rank. Collective: every rank makes one; blocks.

    Where MPI does not allow several threads at once, ranks cannot be asked: the root knows of
    itself alone.

    Args:
        comm: the ranks of the job.
    """

    def __init__(self, comm: _engine.Communicator):
        self._comm, self._mpi = comm, comm.mpi
        mine = (os.uname().nodename, os.getpid(), self._may_talk())
        told = [mine] if comm.mpi is None else comm.world.allgather(mine)
        talk = all(talks for _, _, talks in told)
        self._places = [(host, pid) for host, pid, _ in told]
        self._mailbox = _engine.Mailbox(comm.world) if comm.size > 1 and talk else None
        self._note = "" if talk else CANNOT_ASK
        self._started = time.time()
        self._wanted = float("-inf")  # a report must have been asked for after this moment
        self._asked: dict[int, float] = {}  # by rank that has not answered yet: when
        self._known: dict[int, tuple[Report, float]] = {}  # and when it was asked for
        self._news = threading.Condition()
        self._wake, self._ends = threading.Event(), False
        name = "keras_dist gathering"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; no message is left behind. Collective: every rank; blocks."""
        self.abandon()
        if self._mailbox is not None:
            self._mailbox.close()

    def abandon(self) -> None:
        """Ends it where a rank has died, so that no others can be waited for."""
        self._ends = True
        self._wake.set()
        with self._news:
            self._news.notify_all()
        self._thread.join()

    def job(self) -> Job:
        """Returns what is known of all ranks, after asking them. On the root, in any thread.

        Waits for a second at most where all ranks answer, else for two.
        """
        with self._news:
            if self._mailbox is not None:
                self._wanted = time.monotonic() - FRESH_SECONDS
                self._wake.set()
                self._news.wait_for(lambda: not self._missing() or self._ends, PATIENCE_SECONDS)
            self._known[0] = of_this_rank(self._comm), time.monotonic()
            rows = [self._row(rank) for rank in range(len(self._places))]
        host, pid = self._places[0]
        return Job(_name(), host, pid, self._started, time.time(), rows, self._note)

    def _may_talk(self) -> bool:
        return self._mpi is None or self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE

    def _row(self, rank: int) -> Row:
        if rank in self._known:
            report, asked = self._known[rank]
            return Row(report, max(time.monotonic() - asked, 0.0))
        return Row(Report(rank, *self._places[rank], time=self._started), None)

    def _missing(self) -> list[int]:
        """Returns the ranks of which nothing new enough is known."""
        others = range(1, len(self._places))
        return [rank for rank in others if self._asked_at(rank) < self._wanted]

    def _asked_at(self, rank: int) -> float:
        return self._known[rank][1] if rank in self._known else float("-inf")

    def _run(self) -> None:
        try:
            while not self._ends:
                self._wake.wait(self._pause())
                self._wake.clear()
                if self._mpi is not None and self._mpi.Is_finalized():
                    return
                take_sample()
                if self._mailbox is not None:
                    self._talk(self._mailbox)
        except Exception as error:
            if self._mpi is None or not _engine.failed_process(self._mpi, error):
                _log.warning("%s keras-dist top sees no more: %r", self._comm.where(), error)

    def _pause(self) -> float:
        awaited = time.monotonic() - self._wanted < FRESH_SECONDS + PATIENCE_SECONDS
        return BUSY_SECONDS if self._asked and awaited else POLL_SECONDS

    def _talk(self, mailbox: _engine.Mailbox) -> None:
        for message in mailbox.receive():
            if message is None:  # the root asks
                mailbox.post(0, of_this_rank(self._comm))
                continue
            with self._news:
                self._known[message.rank] = message, self._asked.pop(message.rank)
                self._news.notify_all()
        for rank in self._missing():
            if rank not in self._asked:
                self._asked[rank] = time.monotonic()
                mailbox.post(rank, None)


@functools.cache
def _name() -> str:
    """Returns what this process runs: a script, a module or a notebook."""
    main = sys.modules.get("__main__")
    return os.path.basename(getattr(main, "__file__", None) or "") or "python"
