"""The trace file of one rank, written line by line. Independent of MPI and frameworks.

A line is a list of integers, or a JSON object: the head, the name of a number, the end. All lines
but the last are complete if the process is killed.
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

from keras_dist._engine.signature import CollectiveSignature, Entry
from keras_dist._engine.tracing import spans

FLUSH_SECONDS = 0.5
EVENT_NBYTES = 120  # of the merged trace, on average
MAX_KNOWN = 1000

_log = logging.getLogger("keras_dist")
_writer: "TraceWriter | None" = None


class TraceWriter:
    """The file of a rank, of at most `limit` bytes when merged, and the thread that writes it."""

    def __init__(self, path: str, head: Mapping[str, Any], steps: tuple[int, int], limit: int):
        self.path, self.head = path, head
        self.is_full = False
        self.recorder = spans.Recorder(*steps)
        self._most = limit // EVENT_NBYTES
        self._events = 0
        self._lanes = 0  # number of lanes whose names have been written
        self._numbers = _Numbers()
        # By id; the signature is kept alive, so that no other object gets its id.
        self._calls: dict[int, tuple[CollectiveSignature, int]] = {}
        self._flushing = threading.Lock()
        self._over = threading.Event()
        self._file = open_trace(path)
        self._write([json.dumps(head)])
        self._thread = threading.Thread(target=self._serve, name="keras_dist timeline", daemon=True)
        self._thread.start()

    def close(self, **last: Any) -> None:
        """Writes the remaining records and a last line, and ends the thread."""
        self._over.set()
        self._thread.join()
        self.flush()
        self._write([json.dumps({"end": True, **last})])
        os.close(self._file)

    def flush(self) -> None:
        with self._flushing:
            records = self.recorder.records
            lines = []
            for _ in range(len(records)):
                if self._events >= self._most:
                    break
                lines.append(self._line(records.popleft()))
            lanes = list(self.recorder.lanes)
            named = [{"lane": n, "name": lanes[n]} for n in range(self._lanes, len(lanes))]
            self._lanes = len(lanes)
            # Names come before the records that use them: the end may be cut off.
            head = [json.dumps(entry) for entry in (*named, *self._numbers.new)]
            self._numbers.new.clear()
            if not self.is_full:
                self._write([*head, *lines])
                self._check_size()

    def _line(self, record: tuple[Any, ...]) -> str:
        self._events += 1
        if record[0] != spans.OPERATION:
            kind, lane, name, began, ended, number = record
            return f"[{kind},{lane},{self._numbers[name]},{began},{ended},{number}]"
        kind, lane, call, requested, began, ended, phases = record
        self._events += len(phases) // 4
        phases[::4] = map(self._numbers.__getitem__, phases[::4])
        known = self._calls.get(id(call)) or self._describe(call)
        return repr([kind, lane, known[1], requested, began, ended, *phases])

    def _describe(self, call: CollectiveSignature) -> tuple[CollectiveSignature, int]:
        name, entries = call.operation, call.entries
        if len(call.buckets) > 1 and call.bucket is not None:
            name = f"{name}, bucket {call.bucket + 1} of {len(call.buckets)}"
            entries = tuple(entries[index] for index in call.buckets[call.bucket])
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

    def _check_size(self) -> None:
        if self._events >= self._most:
            self._fill()
            self._write([json.dumps({"full": self.recorder.steps})])
            _log.warning(
                "keras_dist: rank %s ended its recording at step %d: the trace "
                "has reached its size (KERAS_DIST_TIMELINE_MBYTES); KERAS_DIST_TIMELINE_STEPS=100:"
                "200 records only these steps.",
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
        except OSError as error:  # a full disk, for example: training continues
            if not self.is_full:
                _log.warning("keras_dist ended the recording of its timeline: %s", error)
            self._fill()

    def _serve(self) -> None:
        while not self._over.wait(FLUSH_SECONDS):
            self.flush()


class _Numbers(dict[str, int]):
    """Numbers of names; `new` has those that are still to be written."""

    def __init__(self) -> None:
        self.new: list[dict[str, Any]] = []

    def __missing__(self, name: str) -> int:
        return self._add(name, {"name": name})

    def number(self, name: str, **fields: Any) -> int:
        """Returns the number of a name with fields; the same name may have several."""
        named = {"name": name, **fields}
        key = repr(named)
        return self[key] if key in self else self._add(key, named)

    def _add(self, key: str, named: dict[str, Any]) -> int:
        self[key] = number = len(self)
        self.new.append({"number": number, **named})
        return number


def open_trace(path: str) -> int:
    """Makes a trace file, in place of an existing one; returns its descriptor."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    # O_EXCL: a link that another user places there meanwhile is not followed.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def start_trace(path: str, head: Mapping[str, Any], steps: tuple[int, int], limit: int) -> None:
    """Starts to record this process; see `TraceWriter`."""
    global _writer
    _writer = TraceWriter(path, head, steps, limit)
    spans.recorder = _writer.recorder


def stop_trace(**last: Any) -> TraceWriter | None:
    """Stops recording, if it is on, and writes a last line; returns the writer."""
    global _writer
    writer, _writer, spans.recorder = _writer, None, None
    if writer is not None:
        writer.close(**last)
    return writer


def is_recording() -> bool:
    """Returns whether this process is recorded."""
    return _writer is not None


def flush_trace() -> None:
    """Writes the records so far, before this process may end."""
    if _writer is not None:
        _writer.flush()


def forget_trace() -> None:
    """Stops recording without a last line, in a process forked from the recorded one."""
    global _writer
    _writer, spans.recorder = None, None


def _nbytes(entry: Entry) -> int:
    """Returns the size of an array in bytes, 0 if it is unknown before the operation."""
    if min(entry.shape, default=0) < 0:
        return 0
    try:
        return math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
    except TypeError:  # bfloat16, if ml_dtypes is not imported
        return 0
