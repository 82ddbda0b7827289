"""The stall watchdog: finds ranks that do not arrive, and reports. See decisions 28 and 45."""

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keras_dist._engine.faults.progress import describe_progress
from keras_dist._engine.faults.rank_state import (
    MAX_NAMED,
    RankState,
    current_state,
    describe_operation,
    format_rank_list,
    is_stopped,
)
from keras_dist._engine.mpi.library import failed_process
from keras_dist._engine.shm.segments import clean_up
from keras_dist._engine.shm.wait import LAST, waits
from keras_dist._engine.sideband import (
    ALARM,
    CONFIRMATION,
    Alarms,
    Inquiries,
    Inquiry,
    Mailbox,
    Ranks,
)

MAX_IDLE_SECONDS = 5.0  # between checks, while no rank waits for long
BUSY_SECONDS = 0.05  # between checks, during an alarm
PATIENCE_SECONDS = 2.0  # time for an answer, beyond two checks
FLUSH_SECONDS = 0.5  # time for a launcher to pass on the output, before it ends the job

_log = logging.getLogger("keras_dist")

NO_THREADS = "this MPI does not allow calls from several threads at once (MPI_THREAD_MULTIPLE)"
A_RANK_HAS_DIED = "a rank has died and the others have not recovered yet"


@dataclasses.dataclass
class _Case:
    """An alarm: what this rank finds out about ranks that wait for each other."""

    ranks: Ranks
    due: float
    ends: bool = False
    asked: Ranks = ()
    asked_at: float = 0.0
    inquiry: Inquiry[RankState] | None = None

    @property
    def states(self) -> Mapping[int, RankState]:
        return {} if self.inquiry is None else self.inquiry.found


class StallWatchdog:
    """Warns each `period` seconds of a wait, ends the job after `limit`; 0: never. Collective."""

    def __init__(self, mpi: Any, world: Any, period: int, limit: int):
        self._mpi, self._period, self._limit = mpi, period, limit
        self._rank, self._size = world.Get_rank(), world.Get_size()
        mine = (os.uname().nodename, os.getpid(), mpi.Query_thread() >= mpi.THREAD_MULTIPLE)
        everyone = world.allgather(mine)
        self._processes = [(node, pid) for node, pid, _ in everyone]
        self._talks = all(talks for _, _, talks in everyone)
        self._why_alone = NO_THREADS
        self._turn = threading.Lock()  # held while the thread may send messages
        self._idle_seconds = min(MAX_IDLE_SECONDS, min(filter(None, (period, limit))) / 4)
        self._patience = 2 * self._idle_seconds + PATIENCE_SECONDS
        self._launcher = os.getppid()
        self._busy_until = 0.0
        self._due: dict[float, float] = {}  # by start of a wait: seconds until the next alarm
        self._alarms = Alarms(
            self._rank, self._size, self._post, self._open_case, self._patience, period or limit
        )
        self._inquiries = Inquiries(
            self._rank, self._post, current_state, self._note_answers, self._patience
        )
        self._cases: dict[Ranks, _Case] = {}
        self._reported: dict[Ranks, float] = {}
        self._silent: dict[int, float] = {}  # start of the silence of ranks that have not answered
        self._mailbox = Mailbox(world) if self._talks else None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keras_dist watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops; no message is lost. Collective: every rank; blocks."""
        self._closing.set()
        self._thread.join()
        if self._mailbox is not None:
            self._mailbox.close()

    def abandon(self) -> None:
        """Stops after a rank has died, without waiting for other ranks."""
        self._closing.set()
        self._thread.join()

    def stop_communication(self) -> None:
        """Sends no more messages, as a rank has died, and continues to watch this rank."""
        with self._turn:
            self._fall_silent()

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._pause()):
                if self._mpi.Is_finalized():
                    return
                if os.getppid() != self._launcher:
                    self._end_alone()
                with self._turn:
                    self._check()
        except Exception as error:
            _log.warning("[rank %d] The stall watchdog has failed: %r", self._rank, error)

    def _check(self) -> None:
        try:
            for message in self._receive():
                self._handle(*message)
            self._check_waits()
            self._alarms.check()
            self._inquiries.check()
            for case in list(self._cases.values()):
                self._investigate(case)
        except self._mpi.Exception as error:
            if not failed_process(self._mpi, error):
                raise
            # A rank that waits for the dead one reports it; others may still be missing.
            self._fall_silent()

    def _fall_silent(self) -> None:
        self._talks, self._why_alone = False, A_RANK_HAS_DIED
        self._cases.clear()
        self._alarms.forget()
        self._inquiries.forget()

    def _end_alone(self) -> None:
        """Ends this rank after its launcher was killed: no other process would."""
        try:
            _log.error(
                "[rank %d of %d] ends: its launcher, process %d, is gone.",
                self._rank,
                self._size,
                self._launcher,
            )
        finally:
            os._exit(1)

    def _pause(self) -> float:
        awaits = self._alarms.are_pending or self._inquiries.are_open
        is_busy = awaits or time.perf_counter() < self._busy_until
        return BUSY_SECONDS if is_busy else self._idle_seconds

    # --- Messages

    def _post(self, rank: int, *message: Any) -> None:
        self._busy_until = time.perf_counter() + self._patience
        if self._mailbox is not None:
            self._mailbox.post(rank, message)

    def _receive(self) -> list[Any]:
        found = self._mailbox.receive() if self._mailbox is not None and self._talks else []
        if found:
            self._busy_until = time.perf_counter() + self._patience
        return found

    def _handle(self, kind: str, *more: Any) -> None:
        if kind == ALARM:
            self._alarms.handle(*more)
        elif kind == CONFIRMATION:
            self._alarms.confirm(*more)
        else:
            self._inquiries.handle(kind, *more)

    def _note_answers(self, states: Mapping[int, RankState]) -> None:
        for rank in states:
            self._silent.pop(rank, None)

    # --- As a rank that waits

    def _check_waits(self) -> None:
        now = time.perf_counter()
        found = waits()
        self._due = {began: self._due.get(began, 0.0) for _, _, began in found}
        if not found:
            self._alarms.withdraw()
        for ranks, what, began in found:
            waited = now - began
            ends = 0 < self._limit <= waited
            too_long = ends or 0 < self._period <= waited
            if not (ranks and too_long and waited >= self._due[began]):
                continue
            again = waited + (self._patience if ends else self._period)
            self._due[began] = again if ends or not self._limit else min(again, self._limit)
            if self._talks:
                self._alarms.raise_alarm(tuple(ranks), ends)
            else:
                self._report_alone(describe_operation(what, describe_progress(ranks)), waited, ends)

    def _report_alone(self, what: str, waited: float, ends: bool) -> None:
        ends = ends and not what.startswith(LAST)  # the others may still be working
        text = (
            f"[rank {self._rank} of {self._size}] has waited {waited:.0f} s for others in {what}. "
            f"Which of them is missing is not known, as {self._why_alone}."
        )
        if ends:
            self._end(f"{text} {self._end_text()}\n{current_state().stacks}", os._exit)
        _log.warning(text)

    # --- As the rank that received the alarm

    def _open_case(self, ranks: Ranks, ends: bool) -> None:
        case = self._cases.get(ranks)
        if case is None:
            due = self._reported.get(ranks, -1e9) + (self._period or self._limit)
            case = self._cases[ranks] = _Case(ranks, due)
        if ends and not case.ends:
            case.ends, case.due, case.asked = True, 0.0, ()

    def _investigate(self, case: _Case) -> None:
        now = time.perf_counter()
        if not case.asked:
            if now >= case.due:
                case.asked = tuple(range(self._size)) if case.ends else case.ranks
                case.asked_at, case.inquiry = now, self._inquiries.ask(case.asked)
        elif case.inquiry is not None and case.inquiry.is_over:
            del self._cases[case.ranks]
            self._report(case)

    def _report(self, case: _Case) -> None:
        found = {
            rank: wait
            for rank in case.ranks
            if rank in case.states and (wait := case.states[rank].waiting_with(case.ranks))
        }
        if not found:
            return  # they have continued meanwhile
        missing = [rank for rank in case.ranks if rank not in found]
        for rank in case.asked:
            if rank not in case.states:
                self._silent.setdefault(rank, case.asked_at)
        # A rank in its last operation also waits for ranks that wait in another one.
        stuck = {rank: wait for rank, wait in found.items() if not wait[0].startswith(LAST)}
        if not (stuck or missing):
            return  # all have arrived
        first = min(stuck or found)
        what, _ = found[first]
        waited = max(seconds for _, seconds in found.values())
        may_finish = not stuck and all(self._may_still_run(rank, case) for rank in missing)
        ends = case.ends and waited >= self._limit and not may_finish
        is_due = case.asked_at >= self._reported.get(case.ranks, -1e9) + self._period
        if not ends and not (self._period and is_due):
            return
        self._reported[case.ranks] = case.asked_at
        text = (
            f"keras_dist: {format_rank_list(found)} of {self._size} "
            f"{'has' if len(found) == 1 else 'have'} waited {waited:.0f} s for "
            f"{format_rank_list(missing) if missing else 'data of each other'} in "
            f"{describe_operation(what, case.states[first].progress)}."
        )
        if ends:
            report = self._describe_ranks(range(self._size), case)
            self._end(f"{text} {self._end_text()}\n{report}", self._mpi.COMM_WORLD.Abort)
        if self._limit and not may_finish:
            text += f" The job ends after {self._limit} s (KERAS_DIST_STALL_ABORT_SECONDS)."
        _log.warning("%s\n%s", text, self._describe_ranks(missing or found, case))

    def _may_still_run(self, rank: int, case: _Case) -> bool:
        """Returns whether a rank may be working while others wait at the end of the script."""
        node, pid = self._processes[rank]
        if rank in case.states or node == os.uname().nodename:
            return not is_stopped(node, pid)
        # A rank does not answer while a call holds the interpreter lock. On another node this looks
        # like a stopped process, until it has lasted as long as the limit.
        return time.perf_counter() - self._silent[rank] < self._limit

    def _describe_ranks(self, ranks: Iterable[int], case: _Case) -> str:
        """Describes the state of ranks; those in the same state are named together."""
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self._describe(rank, case), []).append(rank)
        lines = []
        for text, members in groups.items():
            some = "; ".join(
                "pid {1} on {0}".format(*self._processes[r]) for r in members[:MAX_NAMED]
            )
            lines.append(f"{format_rank_list(members).capitalize()} ({some}){text}")
        return "\n".join(lines)

    def _describe(self, rank: int, case: _Case) -> str:
        state = case.states.get(rank)
        if state is None:
            if is_stopped(*self._processes[rank]):
                return ": no answer, the process is stopped (SIGSTOP, or a debugger)"
            return (
                ": no answer, the process is stopped, or in a call that holds Python's "
                "interpreter lock"
            )
        parts = [state.progress] if state.progress else []
        parts += [
            f"waiting in {what} of {format_rank_list(ranks)}" for ranks, what, _ in state.waits
        ]
        return "".join(f", {part}" for part in parts) + f":\n{state.stacks}"

    def _end_text(self) -> str:
        return f"The job ends now: the limit is {self._limit} s (KERAS_DIST_STALL_ABORT_SECONDS)."

    def _end(self, text: str, end: Callable[[int], Any]) -> None:
        _log.error(text)
        sys.stderr.flush()
        # A rank that was stopped while it made a segment has left its file.
        here = {pid for node, pid in self._processes if node == os.uname().nodename}
        clean_up(here.__contains__)
        time.sleep(FLUSH_SECONDS)
        end(1)
