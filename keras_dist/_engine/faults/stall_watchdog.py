"""The watch for ranks that do not come: who waits, who is missing, and where those are.

A thread of every rank looks now and then whether another thread of it waits for others. As
long as none waits for long, no message is sent. A rank that has waited too long gives alarm to
the first rank that answers, the root as a rule. That one asks all ranks concerned where they
are, logs it and, after a longer time, ends the job. The threads talk through MPI, by a mailbox of
their own, so what the ranks wait in does not matter; where MPI does not allow several threads at
once, each rank says what it knows itself.

Knows MPI's communicators by what they can do, and no framework.
"""

import dataclasses
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from keras_dist._engine.faults.rank_state import (
    MAX_NAMED,
    Ranks,
    RankState,
    is_stopped,
    say_ranks,
    say_what,
    state_here,
)
from keras_dist._engine.mpi.library import failed_process
from keras_dist._engine.mpi.mailbox import Mailbox
from keras_dist._engine.shm.segments import clean_up
from keras_dist._engine.shm.wait import AT_THE_END, waits

__all__ = ["StallWatchdog"]

MAX_IDLE_SECONDS = 5.0  # between two looks, where nothing is wrong
BUSY_SECONDS = 0.05  # where something is
PATIENCE_SECONDS = 2.0  # beyond two looks: how long an answer may take
FLUSH_SECONDS = 0.5  # for a launcher to pass on what was printed, before it ends all

_log = logging.getLogger("keras_dist")

NO_THREADS = "this MPI does not allow calls from several threads at once (MPI_THREAD_MULTIPLE)"
A_RANK_HAS_DIED = "a rank has died and the others have not come together yet"


@dataclasses.dataclass
class _Case:
    """What the rank that was given alarm finds out about ranks that wait for each other."""

    ranks: Ranks
    due: float
    ends: bool = False
    asked: Ranks = ()
    asked_at: float = 0.0
    number: int = 0
    states: dict[int, RankState] = dataclasses.field(default_factory=dict)


class StallWatchdog:
    """The watch of this rank. Collective: every rank of `world` makes one; blocks.

    Args:
        mpi: mpi4py's `MPI` module.
        world: the MPI communicator of the job; it is duplicated.
        period: seconds of waiting after which it is said, again and again; 0: never.
        limit: seconds of waiting after which the job ends; 0: never.
    """

    def __init__(self, mpi: Any, world: Any, period: int, limit: int):
        self._mpi, self._period, self._limit = mpi, period, limit
        self._rank, self._size = world.Get_rank(), world.Get_size()
        mine = (os.uname().nodename, os.getpid(), mpi.Query_thread() >= mpi.THREAD_MULTIPLE)
        told = world.allgather(mine)
        self._places = [(node, pid) for node, pid, _ in told]
        self._talks = all(talks for _, _, talks in told)
        self._why_alone = NO_THREADS
        self._turn = threading.Lock()  # held while the thread may speak to others
        self._idle_seconds = min(MAX_IDLE_SECONDS, min(filter(None, (period, limit))) / 4)
        self._patience = 2 * self._idle_seconds + PATIENCE_SECONDS
        self._launcher = os.getppid()
        self._busy_until = 0.0
        self._due: dict[float, float] = {}  # by begin of a wait: seconds until the next alarm
        self._speaker, self._alarmed_at = 0, 0.0
        self._cases: dict[Ranks, _Case] = {}
        self._told: dict[Ranks, float] = {}
        self._silent: dict[int, float] = {}  # ranks that have not answered: since when
        self._numbers = itertools.count()
        self._mailbox = Mailbox(world) if self._talks else None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keras_dist watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch; no message is left behind. Collective: every rank; blocks."""
        self._closing.set()
        self._thread.join()
        if self._mailbox is not None:
            self._mailbox.close()

    def abandon(self) -> None:
        """Ends the watch where a rank has died, so that no others can be waited for."""
        self._closing.set()
        self._thread.join()

    def be_alone(self) -> None:
        """Asks no other rank any more, as one has died, and goes on to watch this one."""
        with self._turn:
            self._talks, self._why_alone = False, A_RANK_HAS_DIED
            self._cases.clear()

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._pause()):
                if self._mpi.Is_finalized():
                    return
                if os.getppid() != self._launcher:
                    self._end_alone()
                with self._turn:
                    self._watch()
        except Exception as error:
            _log.warning("[rank %d] The stall watch has ended: %r", self._rank, error)

    def _watch(self) -> None:
        try:
            for message in self._receive():
                self._hear(*message)
            self._look()
            for case in list(self._cases.values()):
                self._pursue(case)
        except self._mpi.Exception as error:
            if not failed_process(self._mpi, error):
                raise
            # Whoever waits for that rank says so; the others may still not come.
            self._talks, self._why_alone = False, A_RANK_HAS_DIED
            self._cases.clear()

    def _end_alone(self) -> None:
        """Ends this rank, whose launcher was killed: nobody else would."""
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
        return BUSY_SECONDS if time.perf_counter() < self._busy_until else self._idle_seconds

    # --- Messages

    def _post(self, rank: int, *message: Any) -> None:
        self._busy_until = time.perf_counter() + self._patience
        if rank == self._rank:
            self._hear(*message)
        elif self._mailbox is not None:
            self._mailbox.post(rank, message)

    def _receive(self) -> list[Any]:
        """Returns the messages that have come; does not wait."""
        found = self._mailbox.receive() if self._mailbox is not None and self._talks else []
        if found:
            self._busy_until = time.perf_counter() + self._patience
        return found

    def _hear(self, kind: str, sender: int, ranks: Ranks, *more: Any) -> None:
        if kind == "alarm":
            self._open_case(ranks, *more)
            self._post(sender, "heard", self._rank, ranks)
        elif kind == "heard":
            self._alarmed_at = 0.0
        elif kind == "ask":
            self._post(sender, "answer", self._rank, ranks, *more, state_here())
        else:
            number, state = more
            self._silent.pop(sender, None)
            case = self._cases.get(ranks)
            if case is not None and case.number == number:
                case.states[sender] = state

    # --- As one who waits

    def _look(self) -> None:
        """Gives alarm when a thread of this rank has waited too long."""
        now = time.perf_counter()
        found = waits()
        self._due = {began: self._due.get(began, 0.0) for _, _, began in found}
        if not found:
            self._speaker, self._alarmed_at = 0, 0.0
        elif self._alarmed_at and now - self._alarmed_at > self._patience:
            self._speaker, self._alarmed_at = min(self._speaker + 1, self._rank), 0.0
            self._due = dict.fromkeys(self._due, 0.0)
        for ranks, what, began in found:
            waited = now - began
            ends = 0 < self._limit <= waited
            too_long = ends or 0 < self._period <= waited
            if not (ranks and too_long and waited >= self._due[began]):
                continue
            again = waited + (self._patience if ends else self._period)
            self._due[began] = again if ends or not self._limit else min(again, self._limit)
            if self._talks:
                self._alarmed_at = self._alarmed_at or now
                self._post(self._speaker, "alarm", self._rank, tuple(ranks), ends)
            else:
                self._tell_alone(what, waited, ends)

    def _tell_alone(self, what: Any, waited: float, ends: bool) -> None:
        ends = ends and str(what) != AT_THE_END  # the others may be at work
        state = state_here()
        text = (
            f"[rank {self._rank} of {self._size}] has waited {waited:.0f} s for others in "
            f"{say_what(what, state.progress)}. Which of them is missing is not known, as "
            f"{self._why_alone}."
        )
        if ends:
            self._end(f"{text} {self._say_end()}\n{state.stacks}", os._exit)
        _log.warning(text)

    # --- As the one who was given alarm

    def _open_case(self, ranks: Ranks, ends: bool) -> None:
        case = self._cases.get(ranks)
        if case is None:
            due = self._told.get(ranks, -1e9) + (self._period or self._limit)
            case = self._cases[ranks] = _Case(ranks, due)
        if ends and not case.ends:
            case.ends, case.due, case.asked = True, 0.0, ()

    def _pursue(self, case: _Case) -> None:
        """Asks the ranks of a case, and tells what they say when all have or time is over."""
        now = time.perf_counter()
        if not case.asked:
            if now >= case.due:
                case.asked = tuple(range(self._size)) if case.ends else case.ranks
                case.asked_at, case.number = now, next(self._numbers)
                case.states = {}
                for rank in case.asked:
                    self._post(rank, "ask", self._rank, case.ranks, case.number)
        elif len(case.states) == len(case.asked) or now - case.asked_at > self._patience:
            del self._cases[case.ranks]
            self._tell(case)

    def _tell(self, case: _Case) -> None:
        found = {
            rank: wait
            for rank in case.ranks
            if rank in case.states and (wait := case.states[rank].waiting_with(case.ranks))
        }
        if not found:
            return  # they have gone on meanwhile
        missing = [rank for rank in case.ranks if rank not in found]
        for rank in case.asked:
            if rank not in case.states:
                self._silent.setdefault(rank, case.asked_at)
        # Who has come to the end waits for those as well who wait in something else.
        stuck = {rank: wait for rank, wait in found.items() if wait[0] != AT_THE_END}
        if not (stuck or missing):
            return  # they have all come
        first = min(stuck or found)
        what, _ = found[first]
        waited = max(seconds for _, seconds in found.values())
        goes_on = not stuck and all(self._may_be_at_work(rank, case) for rank in missing)
        ends = case.ends and waited >= self._limit and not goes_on
        is_due = case.asked_at >= self._told.get(case.ranks, -1e9) + self._period
        if not ends and not (self._period and is_due):
            return
        self._told[case.ranks] = case.asked_at
        text = (
            f"keras_dist: {say_ranks(found)} of {self._size} "
            f"{'has' if len(found) == 1 else 'have'} waited {waited:.0f} s for "
            f"{say_ranks(missing) if missing else 'data of each other'} in "
            f"{say_what(what, case.states[first].progress)}."
        )
        if ends:
            report = self._say_where(range(self._size), case)
            self._end(f"{text} {self._say_end()}\n{report}", self._mpi.COMM_WORLD.Abort)
        if self._limit and not goes_on:
            text += f" The job ends after {self._limit} s (KERAS_DIST_STALL_ABORT_SECONDS)."
        _log.warning("%s\n%s", text, self._say_where(missing or found, case))

    def _may_be_at_work(self, rank: int, case: _Case) -> bool:
        """Whether a rank for which others wait at the end may still have something to do.

        A call that holds the interpreter lock lets it not answer. On another node that cannot be
        told from a process that was stopped, until it has lasted as long as the limit.
        """
        node, pid = self._places[rank]
        if rank in case.states or node == os.uname().nodename:
            return not is_stopped(node, pid)
        return time.perf_counter() - self._silent[rank] < self._limit

    def _say_where(self, ranks: Iterable[int], case: _Case) -> str:
        """Says where ranks are; those that are at the same place are named together."""
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self._describe(rank, case), []).append(rank)
        lines = []
        for text, members in groups.items():
            some = "; ".join("pid {1} on {0}".format(*self._places[r]) for r in members[:MAX_NAMED])
            lines.append(f"{say_ranks(members).capitalize()} ({some}){text}")
        return "\n".join(lines)

    def _describe(self, rank: int, case: _Case) -> str:
        state = case.states.get(rank)
        if state is None:
            if is_stopped(*self._places[rank]):
                return ": no answer, the process is stopped (SIGSTOP, or a debugger)"
            return (
                ": no answer, the process is stopped, or in a call that holds Python's "
                "interpreter lock"
            )
        place = [state.progress] if state.progress else []
        place += [f"waiting in {what} of {say_ranks(ranks)}" for ranks, what, _ in state.waits]
        return "".join(f", {part}" for part in place) + f":\n{state.stacks}"

    def _say_end(self) -> str:
        return f"The job ends now: the limit is {self._limit} s (KERAS_DIST_STALL_ABORT_SECONDS)."

    def _end(self, text: str, end: Callable[[int], Any]) -> None:
        _log.error(text)
        sys.stderr.flush()
        # A rank that was stopped while they made a segment has left it with its name.
        here = {pid for node, pid in self._places if node == os.uname().nodename}
        clean_up(here.__contains__)
        time.sleep(FLUSH_SECONDS)
        end(1)
