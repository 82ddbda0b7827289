"""The file in which one rank records, line by line, while it works. Knows no MPI, no framework.

A line is a list of whole numbers, or an object: the head, what a number stands for, the end. Lines
are only appended, several times a second, by a thread; so a process that is killed leaves
all lines but the last whole. `keras_dist.monitor.timeline` makes a trace of the parts of all ranks.
"""

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_dist._engine.collectives.signature import CollectiveSignature, Entry
from keras_dist._engine.tracing import spans

__all__ = [
    "TraceWriter",
    "flush_trace",
    "forget_trace",
    "is_recording",
    "open_trace",
    "start_trace",
    "stop_trace",
]

FLUSH_SECONDS = 0.5
EVENT_NBYTES = 120  # of the trace that is made of it, on the average
MAX_KNOWN = 1000

_log = logging.getLogger("keras_dist")
_part: "TraceWriter | None" = None


class TraceWriter:
    """A rank's file and the thread that writes it.

    Args:
        path: where; what is there is removed.
        head: what the first line says.
        steps: the first step that is recorded and the one before which recording ends.
        limit: how many bytes of the trace this rank may take.
    """

    def __init__(self, path: str, head: Mapping[str, Any], steps: tuple[int, int], limit: int):
        self.path, self.head = path, head
        self.is_full = False
        self.recorder = spans.Recorder(*steps)
        self._most = limit // EVENT_NBYTES
        self._events = 0  # so many there are
        self._lanes = 0  # how many have been written
        self._numbers = _Numbers()
        self._calls: dict[
            int, tuple[CollectiveSignature, int]
        ] = {}  # by id; held, or the id might be another's
        self._flushing = threading.Lock()
        self._over = threading.Event()
        self._file = open_trace(path)
        self._write([json.dumps(head)])
        self._thread = threading.Thread(target=self._serve, name="keras_dist timeline", daemon=True)
        self._thread.start()

    def close(self, **last: Any) -> None:
        """Writes what is left, and a last line, and ends the thread."""
        self._over.set()
        self._thread.join()
        self.flush()
        self._write([json.dumps({"end": True, **last})])
        os.close(self._file)

    def flush(self) -> None:
        """Writes what has been recorded so far."""
        with self._flushing:
            records = self.recorder.records
            lines = []
            for _ in range(len(records)):
                if self._events >= self._most:
                    break
                lines.append(self._line(records.popleft()))
            lanes = list(self.recorder.lanes)
            said = [{"lane": n, "name": lanes[n]} for n in range(self._lanes, len(lanes))]
            self._lanes = len(lanes)
            # What numbers stand for comes first: the end may be cut off.
            head = [json.dumps(one) for one in (*said, *self._numbers.new)]
            self._numbers.new.clear()
            if not self.is_full:
                self._write([*head, *lines])
                self._look_at_size()

    def _line(self, record: tuple[Any, ...]) -> str:
        """Returns a record as a line: the names in it become numbers."""
        self._events += 1
        if record[0] != spans.OPERATION:
            kind, lane, name, began, ended, number = record
            return f"[{kind},{lane},{self._numbers[name]},{began},{ended},{number}]"
        kind, lane, call, came, began, ended, phases = record
        self._events += len(phases) // 4
        phases[::4] = map(self._numbers.__getitem__, phases[::4])
        known = self._calls.get(id(call)) or self._describe(call)
        return repr([kind, lane, known[1], came, began, ended, *phases])

    def _describe(self, call: CollectiveSignature) -> tuple[CollectiveSignature, int]:
        name, entries = call.operation, call.entries
        if len(call.buckets) > 1 and call.bucket is not None:
            name = f"{name}, bucket {call.bucket + 1} of {len(call.buckets)}"
            entries = tuple(entries[place] for place in call.buckets[call.bucket])
        elif call.key is not None:
            name = f"{name} {call.key!r}"
        arrays = ", ".join(entry.name for entry in entries[:3])
        more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
        nbytes = sum(_nbytes(entry) for entry in entries)
        number = self._numbers.number(name, bytes=nbytes, arrays=arrays + more)
        if len(self._calls) >= MAX_KNOWN:
            self._calls.clear()
        self._calls[id(call)] = call, number
        return call, number

    def _look_at_size(self) -> None:
        if self._events >= self._most:
            self._fill()
            self._write([json.dumps({"full": self.recorder.steps})])
            _log.warning(
                "keras_dist: rank %s records no more of its timeline, at step %d: the trace "
                "has reached its size (KERAS_DIST_TIMELINE_MBYTES); KERAS_DIST_TIMELINE_STEPS=100:"
                "200 records these steps alone.",
                self.head["rank"],
                self.recorder.steps,
            )

    def _fill(self) -> None:
        self.is_full = True
        self.recorder.stop()
        self.recorder.records.clear()

    def _write(self, lines: list[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:  # a full disk, for example: training goes on
            if not self.is_full:
                _log.warning("keras_dist records no more of its timeline: %s", error)
            self._fill()

    def _serve(self) -> None:
        while not self._over.wait(FLUSH_SECONDS):
            self.flush()


class _Numbers(dict[str, int]):
    """What stands for names; those that are new wait in `new` to be written."""

    def __init__(self) -> None:
        self.new: list[dict[str, Any]] = []

    def __missing__(self, name: str) -> int:
        return self._add(name, {"name": name})

    def number(self, name: str, **more: Any) -> int:
        """Returns the number of a name of which more is said; two may differ in that alone."""
        said = {"name": name, **more}
        key = repr(said)
        return self[key] if key in self else self._add(key, said)

    def _add(self, key: str, said: dict[str, Any]) -> int:
        self[key] = number = len(self)
        self.new.append({"number": number, **said})
        return number


def open_trace(path: str) -> int:
    """Makes the file of a part, in place of what is there; returns its descriptor.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    # O_EXCL: a link that somebody lays there meanwhile is not followed.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def start_trace(path: str, head: Mapping[str, Any], steps: tuple[int, int], limit: int) -> None:
    """Begins to record what this process does; see `TraceWriter`.

    Raises:
        OSError: the file cannot be written.
    """
    global _part
    _part = TraceWriter(path, head, steps, limit)
    spans.recorder = _part.recorder


def stop_trace(**last: Any) -> TraceWriter | None:
    """Ends recording, if there is any, with a last line; returns what was recorded."""
    global _part
    part, _part, spans.recorder = _part, None, None
    if part is not None:
        part.close(**last)
    return part


def is_recording() -> bool:
    """Tells whether this process records what it does."""
    return _part is not None


def flush_trace() -> None:
    """Writes what has been recorded so far, before this process may end."""
    if _part is not None:
        _part.flush()


def forget_trace() -> None:
    """Leaves the file to another process: this one was forked from it."""
    global _part
    _part, spans.recorder = None, None


def _nbytes(entry: Entry) -> int:
    """Returns the size of an array of a call, 0 where it is not known before."""
    if min(entry.shape, default=0) < 0:
        return 0
    try:
        return math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
    except TypeError:  # bfloat16, where nobody has told numpy of it
        return 0
