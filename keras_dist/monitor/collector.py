"""The collector: the root asks for reports when a client reads. See decisions 35 and 45.

A rank that does not answer is shown with the age of its last report, and is asked once.
"""

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from keras_dist import _engine
from keras_dist.monitor.report import Job, Report, of_this_rank, take_sample

POLL_SECONDS = 0.5
BUSY_SECONDS = 0.05  # of a rank that waits for answers
FRESH_SECONDS = 0.5  # a younger report is not requested again
ANSWER_SECONDS = 1.0  # for a rank to answer, in two polls
PATIENCE_SECONDS = 2.0  # for ranks that do not answer, on each level of the tree
CANNOT_ASK = (
    "rank 0 cannot ask the other ranks: this MPI allows calls from one thread at a time "
    "(below MPI_THREAD_MULTIPLE)"
)

_log = logging.getLogger("keras_dist")


class Collector:
    """The collector of reports, on this rank. Collective: every rank; blocks.

    Where MPI does not allow calls from several threads, the root reports on itself only.
    """

    def __init__(self, comm: _engine.Communicator):
        self._comm, self._mpi = comm, comm.mpi
        several = self._mpi is None or self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE
        mine = (os.uname().nodename, os.getpid(), several)
        everyone = [mine] if comm.mpi is None else comm.world.allgather(mine)
        may_ask = all(may for _, _, may in everyone)
        self._processes = [(host, pid) for host, pid, _ in everyone]
        self._mailbox = _engine.Mailbox(comm.world) if comm.size > 1 and may_ask else None
        self._note = "" if may_ask else CANNOT_ASK
        script = getattr(sys.modules.get("__main__"), "__file__", None)  # or module, or notebook
        self._name = os.path.basename(script or "") or "python"
        self._started = time.time()
        self._wanted = float("-inf")  # reports requested before are too old
        self._asked: dict[int, float] = {}  # when, by rank without an answer yet
        self._known: dict[int, tuple[Report, float]] = {}  # and when it was requested
        self._inquiries = _engine.Inquiries(
            comm.rank, self._post, lambda: of_this_rank(comm), self._note_reports, ANSWER_SECONDS
        )
        self._patience = PATIENCE_SECONDS * max(1, _engine.height(comm.size - 1))
        self._news = threading.Condition()
        self._wake, self._ends = threading.Event(), False
        name = "keras_dist collector"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the collector; no message stays in flight. Collective: every rank; blocks."""
        self.abandon()
        if self._mailbox is not None:
            self._mailbox.close()

    def abandon(self) -> None:
        """Stops the collector without waiting for other ranks, because a rank has died."""
        self._ends = True
        self._wake.set()
        with self._news:
            self._news.notify_all()
        self._thread.join()

    def job(self) -> Job:
        """Returns the state of the job, after requesting reports. On the root, in any thread."""
        with self._news:
            if self._mailbox is not None:
                self._wanted = time.monotonic() - FRESH_SECONDS
                self._wake.set()
                # With up to nine ranks, one second at most where all answer, else two; with more
                # ranks, as long for each level of the tree.
                self._news.wait_for(lambda: not self._missing() or self._ends, self._patience)
            self._known[0] = of_this_rank(self._comm), time.monotonic()
            rows = [self._row(rank) for rank in range(len(self._processes))]
        host, pid = self._processes[0]
        return Job(self._name, host, pid, self._started, time.time(), rows, self._note)

    def _row(self, rank: int) -> Report:
        if rank in self._known:
            report, asked = self._known[rank]
            return dataclasses.replace(report, age=max(time.monotonic() - asked, 0.0))
        return Report(rank, *self._processes[rank], time=self._started)

    def _missing(self) -> list[int]:
        """Returns the ranks without a recent report."""
        fresh = {rank for rank, (_, asked) in self._known.items() if asked >= self._wanted}
        return [rank for rank in range(1, len(self._processes)) if rank not in fresh]

    def _run(self) -> None:
        try:
            while not self._ends:
                self._wake.wait(BUSY_SECONDS if self._inquiries.are_open else POLL_SECONDS)
                self._wake.clear()
                if self._mpi is not None and self._mpi.Is_finalized():
                    return
                take_sample()
                if self._mailbox is not None:
                    self._exchange(self._mailbox)
        except Exception as error:
            if self._mpi is None or not _engine.library.failed_process(self._mpi, error):
                _log.warning(
                    "%s keras-dist top gets no more reports: %r", self._comm.where(), error
                )

    def _exchange(self, mailbox: _engine.Mailbox) -> None:
        for message in mailbox.receive():
            self._inquiries.handle(*message)
        self._inquiries.check()
        now = time.monotonic()
        if wanted := [rank for rank in self._missing() if rank not in self._asked]:
            self._asked.update(dict.fromkeys(wanted, now))
            self._inquiries.ask(wanted)

    def _post(self, rank: int, *message: Any) -> None:
        if self._mailbox is not None:
            self._mailbox.post(rank, message)

    def _note_reports(self, reports: Mapping[int, Report]) -> None:
        with self._news:
            for rank, report in reports.items():
                if (asked := self._asked.pop(rank, None)) is not None:
                    self._known[rank] = report, asked
            self._news.notify_all()
