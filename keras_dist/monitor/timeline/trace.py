"""The trace of all ranks, in the trace event format of Chrome: a rank is a process of the trace.

The last line of a rank that was killed may be incomplete. Recordings are read several times, so
that memory does not grow with the number of events.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import glob
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from keras_dist import errors
from keras_dist.storage import atomic_write

KEY = "keras_dist"  # key in `otherData`
OPERATION, OPEN = 0, 2  # kinds of records, as in `_engine.tracing.spans`
# Names of threads and events with a meaning.
COMMUNICATION, BEHIND = "communication", ", queued"
WAIT = "wait for ranks"
PENDING = ("wait for a queued operation", "wait for the GPU")  # of a thread, outside operations
STEP, EPOCH, COMPUTE, QUEUE = "step", "epoch", "compute", "queue"

QUEUED_NS = 20_000  # shorter times are overhead of the call, not queueing
LAST_INDEX = 1000  # sort index of communication threads

Rendezvous = tuple[str, int]  # thread and number, equal on all ranks
Arrivals = dict[Rendezvous, tuple[int, int]]  # arrival of the last rank, and the rank


def begin_trace(path: str, job: str) -> None:
    """Writes an empty trace with the id of the job."""
    text = "The job has not ended, or was killed: keras-dist timeline puts its parts together"
    event = {"name": text, "ph": "i", "s": "g", "ts": 0, "pid": 0, "tid": 0}
    _write(path, {"job": job, "complete": False}, [json.dumps(event)])


def complete(path: str, job: str, by_reader: bool = False) -> list[dict[str, Any]]:
    """Writes a job's trace atomically from recordings, which stay, as the job may be running."""
    ranks = [RankEvents(part) for part in parts_of(path, job)]
    start = min((rank.first for rank in ranks), default=0)
    last = _last_arrivals(ranks)
    about = [rank.metadata for rank in ranks]
    started = min((rank.head["started"] for rank in ranks), default=0)
    whole = bool(about) and all(part["ended"] for part in about)
    metadata = {"job": job, "complete": whole, "started": started, "ranks": about}
    events = itertools.chain.from_iterable(part.events(start, last) for part in ranks)
    # The root removes the recordings after it has written the trace.
    _write(path, metadata, events, lambda: not by_reader or bool(parts_of(path, job)))
    return about


def _last_arrivals(ranks: "Iterable[RankEvents]") -> Arrivals:
    last: Arrivals = {}
    for rank in ranks:
        for rendezvous, at in rank.arrivals():
            if rendezvous not in last or last[rendezvous][0] < at:
                last[rendezvous] = at, rank.rank
    return last


def _write(
    path: str,
    metadata: Mapping[str, Any],
    events: Iterable[str],
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    with atomic_write.beside(pathlib.Path(path)) as whole:
        with whole.open("x") as file:
            other = json.dumps({KEY: metadata})
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write(f",\n{event}" if number else event)
            file.write("\n]}\n")
        if is_wanted():
            # Not `atomic_write.move`: while it waits for the disk, the root may write its trace.
            os.replace(whole, path)


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
        self._wait = next((n for n, line in self._names.items() if line["name"] == WAIT), None)
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
        place = f"rank {self.rank} on {self.head['host']}"
        yield self._event("process_name", "M", 0, args={"name": place})
        yield self._event("process_sort_index", "M", 0, args={"sort_index": self.rank})
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

    def _aligner(self) -> Callable[[int], int]:
        """Returns a function to times of the root, interpolated between two measurements."""
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


def part_path(path: str, rank: int) -> str:
    """Returns the recording of a rank for the timeline at `path`."""
    return f"{path}.rank{rank}.part"


def parts_of(path: str, job: str) -> list[str]:
    """Returns the recordings of a job on this file system, in the order of ranks."""
    found = glob.glob(f"{glob.escape(path)}.rank*.part")
    heads = {part: head_of(part) for part in found}
    mine = [part for part in found if heads[part].get("job") == job]
    return sorted(mine, key=lambda part: heads[part]["rank"])


def head_of(part: str) -> dict[str, Any]:
    """Returns the header of a recording; empty without one."""
    try:
        with open(part) as file:
            line = file.readline()
        return json.loads(line) if line.endswith("\n") else {}
    except (OSError, ValueError):
        return {}


def lines_of(part: str) -> Iterator[Any]:
    """Yields the lines of a recording: lists of integers, and dicts."""
    with open(part, errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return  # the rank was killed during a write
            try:
                yield json.loads(line)
            except ValueError:
                raise damaged(part, f"line {number} is not what keras_dist writes") from None


def damaged(path: str, received: str) -> errors.DataError:
    """Returns the error for a file that is not a timeline."""
    remedy = "Record it again, with KERAS_DIST_TIMELINE; parts of it may open in a viewer."
    expected = f"a timeline of keras_dist in {path}"
    return errors.DataError("[keras-dist timeline]", expected, received, remedy)
