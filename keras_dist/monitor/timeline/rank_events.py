"""The recording of one rank as events of a trace."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_dist.monitor.timeline.rank_traces import OPEN, OPERATION, lines_of

__all__ = [
    "BEHIND",
    "COMMUNICATION",
    "COMPUTE",
    "EPOCH",
    "PENDING",
    "WAIT",
    "Arrivals",
    "RankEvents",
]

# Names of threads and events with a meaning.
COMMUNICATION, BEHIND = "communication", ", queued"
WAIT = "wait for ranks"
PENDING = ("wait for a queued operation", "wait for the GPU")  # of a thread, outside operations
STEP, EPOCH, COMPUTE, QUEUE = "step", "epoch", "compute", "queue"

QUEUED_NS = 20_000  # shorter times are overhead of the call, not queueing
LAST_INDEX = 1000  # sort index of communication threads

Rendezvous = tuple[str, int]  # thread and number, equal on all ranks
Arrivals = dict[Rendezvous, tuple[int, int]]  # arrival of the last rank, and the rank


class RankEvents:
    """The recording of one rank, and the offset of its clock to that of the root."""

    def __init__(self, path: str):
        self._path = path
        self.head: dict[str, Any] = {}
        self._threads: dict[int, str] = {}
        self._names: dict[int, dict[str, Any]] = {}
        self._tail: dict[str, Any] = {}
        self._until = 0  # latest time, by its own clock
        for line in lines_of(path):
            if isinstance(line, list):
                self._until = max(self._until, line[5] if line[0] == OPERATION else line[4])
            elif "job" in line:
                self.head = line
            elif "lane" in line:
                self._threads[line["lane"]] = line["name"]
            elif "number" in line:
                self._names[line["number"]] = line
            else:
                self._tail |= line
        self._wait = self._number_of(WAIT)
        self.rank: int = self.head["rank"]
        self._on_root = self._aligner()
        self.first = self._on_root(self.head["clock"][0])

    @property
    def metadata(self) -> dict[str, Any]:
        """Rank, host, process, alignment of the clock, and end of the recording."""
        clocks = [self.head["clock"], *([self._tail["clock"]] if "clock" in self._tail else [])]
        return {
            "rank": self.rank,
            "host": self.head["host"],
            "pid": self.head["pid"],
            "clock_offset_us": [clock[1] / 1e3 for clock in clocks],
            "clock_error_us": [clock[2] / 1e3 for clock in clocks],
            "ended": "end" in self._tail,
            "full_at_step": self._tail.get("full"),
        }

    def arrivals(self) -> Iterator[tuple[Rendezvous, int]]:
        """Yields each rendezvous and the arrival of this rank, by the clock of the root."""
        for line in self._records():
            if line[0] == OPERATION:
                for phase, came, _, number in _phases(line):
                    if phase == self._wait and number:
                        yield self._rendezvous(line[1], number), self._on_root(came)

    def events(self, start: int, last: Arrivals) -> Iterator[str]:
        """Yields events as JSON."""
        yield from self._metadata()

        def bar(lane: int, name: str, low: int, high: int, args: Any = None) -> str:
            began, ended = self._on_root(low) - start, self._on_root(high) - start
            times = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
            return self._event(name, "X", lane, **times, **({"args": args} if args else {}))

        numbers = itertools.count()
        busy: list[tuple[int, int]] = []  # intervals without computation since the last step
        opened: dict[tuple[int, ...], list[int]] = {}
        for line in self._records():
            kind, lane, what, *times = line
            name = self._names[what]["name"]
            if kind == OPEN:
                opened[lane, what, times[0]] = line
            elif kind == OPERATION:
                came, began, ended = times[:3]
                if not self._threads[lane].endswith(BEHIND):
                    busy.append((began, ended))
                if began - came > QUEUED_NS:
                    # Queueing may overlap other bars of the thread.
                    known = {"cat": QUEUE, "id": f"{self.rank}.{next(numbers)}"}
                    for end, at in (("b", came), ("e", began)):
                        at = self._on_root(at) - start
                        yield self._event(QUEUE, end, lane, ts=at / 1e3, **known)
                yield bar(lane, name, began, ended, self._arguments(what, line))
                for phase, low, high, number in _phases(line):
                    at, rank = last.get(self._rendezvous(lane, number), (0, 0))
                    late = {"last": rank, "late_us": max(0, at - self._on_root(low)) / 1e3}
                    yield bar(lane, self._names[phase]["name"], low, high, late if at else None)
            else:
                began, ended, number = times
                opened.pop((lane, what, began), None)
                if name == STEP:
                    for low, high in _gaps(busy, began, ended):
                        yield bar(lane, COMPUTE, low, high)
                    busy.clear()
                elif name in PENDING:
                    busy.append((began, ended))
                numbered = {"number": number} if name in (STEP, EPOCH) else None
                yield bar(lane, name, began, ended, numbered)
        if "full" in self._tail:
            text = f"rank {self.rank} recording ended: the timeline reached its size"
            ended = self._on_root(self._until) - start
            yield self._event(text, "i", 0, s="p", ts=ended / 1e3)
        for (lane, what, began), line in opened.items():
            args = {"number": line[5], "unfinished": True}
            yield bar(lane, self._names[what]["name"], began, max(self._until, began), args)

    def _records(self) -> Iterator[list[int]]:
        return (line for line in lines_of(self._path) if isinstance(line, list))

    def _rendezvous(self, lane: int, number: int) -> Rendezvous:
        return self._threads[lane].removesuffix(BEHIND), number

    def _event(self, name: str, kind: str, lane: int, **more: Any) -> str:
        event = {"name": name, "ph": kind, "pid": self.rank, "tid": lane, **more}
        return json.dumps(event, separators=(",", ":"))

    def _metadata(self) -> Iterator[str]:
        of_rank = {"process_name": {"name": f"rank {self.rank} on {self.head['host']}"}}
        of_rank |= {"process_sort_index": {"sort_index": self.rank}}  # type: ignore[dict-item]
        for kind, args in of_rank.items():
            yield self._event(kind, "M", 0, args=args)
        for lane, name in self._threads.items():
            index = lane + LAST_INDEX if name.startswith(COMMUNICATION) else lane
            yield self._event("thread_name", "M", lane, args={"name": name})
            yield self._event("thread_sort_index", "M", lane, args={"sort_index": index})

    def _arguments(self, what: int, line: Sequence[int]) -> dict[str, Any]:
        operation = self._names[what]
        waited = sum(high - low for phase, low, high, _ in _phases(line) if phase == self._wait)
        busy = line[5] - line[4] - waited
        arguments = {"bytes": operation["bytes"], "arrays": operation["arrays"]}
        if operation["bytes"]:
            arguments["GB/s"] = float(f"{operation['bytes'] / max(busy, 1):.3g}")
        if line[4] - line[3] > QUEUED_NS:
            arguments["queue_us"] = (line[4] - line[3]) / 1e3
        return arguments

    def _number_of(self, name: str) -> int | None:
        return next((n for n, operation in self._names.items() if operation["name"] == name), None)

    def _aligner(self) -> Callable[[int], int]:
        """Returns a function from times of this rank to times of the root.

        The offset is interpolated between its two measurements, at the start and at the end.
        """
        began, offset, _ = self.head["clock"]
        ended, later, _ = self._tail.get("clock", (began, offset, 0))
        if later == offset:
            return lambda time: time - offset
        drift = (later - offset) / (ended - began)
        return lambda time: time - offset - round((time - began) * drift)


def _phases(line: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the phases of an operation: name, start, end, and number of the rendezvous."""
    phases = line[6:]
    return zip(phases[::4], phases[1::4], phases[2::4], phases[3::4], strict=True)


def _gaps(busy: Sequence[tuple[int, int]], began: int, ended: int) -> Iterator[tuple[int, int]]:
    """Yields the gaps that intervals leave in another interval."""
    for low, high in sorted(busy):
        if began < min(low, ended):
            yield began, min(low, ended)
        began = max(began, high)
    if began < ended:
        yield began, ended
