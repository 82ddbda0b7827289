"""Spans of the timeline: what this process does, and when. Independent of MPI and frameworks.

Without a recorder a span costs one check of `recorder`. With one, an operation is one record, from
the call for the lock of its communicator on, with its phases; other work of a thread, such as a
step, is a span. Times are those of `time.perf_counter_ns`, which all processes of a node share.
"""

import collections
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from time import perf_counter_ns
from typing import Any

OPERATION, SPAN, OPEN = 0, 1, 2  # kinds of records
WAIT = "wait for ranks"

recorder: "Recorder | None" = None

_NOTHING: AbstractContextManager[Any] = nullcontext()
_current: dict[int, "RecordedLock"] = {}  # by thread


class Recorder:
    """Collects records."""

    def __init__(self, first: int = 0, end: int = sys.maxsize):
        self.records: collections.deque[tuple[Any, ...]] = collections.deque()
        self.lanes: list[str] = []  # their names
        self.steps = 0
        self.is_on = first == 0
        self.in_step = False
        self.queued: dict[int, int] = {}  # by thread: when its operation was queued
        self.epoch: _Span | None = None
        self._window = range(first, end)
        self._threads: dict[int, int] = {}  # the lane of each

    def add_lane(self, name: str) -> int:
        self.lanes.append(name)
        return len(self.lanes) - 1

    def lane_of_thread(self) -> int:
        lane = self._threads.get(get_ident())
        if lane is None:
            thread = threading.current_thread()
            is_main = thread is threading.main_thread()
            lane = self.add_lane("training" if is_main else f"thread {thread.name}")
            self._threads[get_ident()] = lane
        return lane

    def stop(self) -> None:
        self._window, self.is_on = range(0), False

    def count_steps(self, count: int = 1) -> None:
        """Counts steps that start; recording starts and ends by their number."""
        self.is_on = self.steps in self._window
        self.steps += count


class Lane:
    """The lanes of one communicator: one for its calls, one for its queued operations."""

    def __init__(self, name: str, recorder: Recorder):
        self.recorder = recorder
        self.usual = recorder.add_lane(name)
        self.queued = recorder.add_lane(f"{name}, queued")
        self.operation: RecordedLock | None = None


class RecordedLock:
    """The lock of a communicator, whose outermost use is recorded, from its request on."""

    __slots__ = ("_lane", "_lock", "_number", "_outer", "_requested", "_since", "call", "phases")

    def __init__(self, lane: Lane, lock: Any):
        self._lane, self._lock = lane, lock
        self.call: Any = None
        self.phases: list[Any] = []

    def __enter__(self) -> None:
        requested = perf_counter_ns()
        self._lock.__enter__()
        lane = self._lane
        if lane.operation is None:  # otherwise it is part of another
            thread = get_ident()
            lane.operation = self
            self._outer = _current.get(thread)
            _current[thread] = self
            queued = lane.recorder.queued.pop(thread, None)
            self._requested = requested if queued is None else queued
            self._number = lane.usual if queued is None else lane.queued
            self._since = perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        lane = self._lane
        if lane.operation is self:
            lane.operation = None
            if self._outer is None:
                del _current[get_ident()]
            else:
                _current[get_ident()] = self._outer
            if lane.recorder.is_on and self.call is not None:
                times = (self._requested, self._since, perf_counter_ns())
                record = (OPERATION, self._number, self.call, *times, self.phases)
                lane.recorder.records.append(record)
        self._lock.__exit__(*error)


class _Phase:
    __slots__ = ("_began", "_meeting", "_name", "_operation")

    def __init__(self, operation: RecordedLock, name: str, meeting: int):
        self._operation, self._name, self._meeting = operation, name, meeting

    def __enter__(self) -> None:
        self._began = perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        self._operation.phases += (self._name, self._began, perf_counter_ns(), self._meeting)


class _Span:
    """Work of a thread outside of operations; the start of a task is a record as well."""

    __slots__ = ("_began", "_is_task", "_lane", "_name", "_number", "_recorder")

    def __init__(self, recorder: Recorder, name: str, number: int, is_task: bool = False):
        self._recorder, self._name, self._number = recorder, name, number
        self._is_task = is_task

    def __enter__(self) -> None:
        recorder = self._recorder
        self._lane = recorder.lane_of_thread()
        self._began = began = perf_counter_ns()
        if self._is_task:
            recorder.records.append((OPEN, self._lane, self._name, began, began, self._number))

    def __exit__(self, *error: object) -> None:
        if self._recorder.is_on or self._is_task:
            times = (self._began, perf_counter_ns())
            self._recorder.records.append((SPAN, self._lane, self._name, *times, self._number))


class _Step(_Span):
    __slots__ = ()

    def __init__(self, recorder: Recorder, count: int):
        super().__init__(recorder, "step", recorder.steps)
        recorder.count_steps(count)

    def __enter__(self) -> None:
        self._recorder.in_step = True
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._recorder.in_step = False
        super().__exit__(*error)


def phase(name: str) -> AbstractContextManager[Any]:
    """Returns a context manager for a phase of the operation of the calling thread."""
    if recorder is None:
        return _NOTHING
    operation = _current.get(get_ident())
    return _NOTHING if operation is None else _Phase(operation, name, 0)


def phase_or_span(name: str) -> AbstractContextManager[Any]:
    """Returns a phase of the operation of the calling thread; without one, a span."""
    return phase(name) if get_ident() in _current else span(name)


def rendezvous(call: Any, number: int = 0) -> AbstractContextManager[Any]:
    """Returns a context manager for the phase in which an operation waits for all ranks."""
    if recorder is None:
        return _NOTHING
    operation = _current.get(get_ident())
    if operation is None:
        return _NOTHING
    if operation.call is None:
        operation.call = call
    return _Phase(operation, WAIT, number)


def span(name: str) -> AbstractContextManager[Any]:
    """Returns a context manager that is recorded on the lane of the calling thread."""
    return _NOTHING if recorder is None else _Span(recorder, name, 0)


def task(name: str) -> AbstractContextManager[Any]:
    """Returns a context manager for a task such as fit, recorded from its start, for all steps."""
    return _NOTHING if recorder is None else _Span(recorder, name, 0, is_task=True)


def begin_epoch(epoch: int) -> None:
    """Records the start of an epoch and the end of the one before."""
    if recorder is not None:
        end_epoch()
        recorder.epoch = _Span(recorder, "epoch", epoch, is_task=True)
        recorder.epoch.__enter__()


def end_epoch() -> None:
    """Records the end of the epoch, if there is one."""
    if recorder is not None and recorder.epoch is not None:
        recorder.epoch.__exit__()
        recorder.epoch = None


def step(count: int) -> AbstractContextManager[Any]:
    """Returns a context manager that is recorded as steps of training."""
    return _NOTHING if recorder is None else _Step(recorder, count)


def count_update() -> None:
    """Counts a gradient reduction as a step, if steps are not recorded otherwise."""
    if recorder is not None and not recorder.in_step:
        recorder.count_steps()


def queued(work: Any) -> Any:
    """Returns a function to queue that records the time at which it was queued."""
    if recorder is None:
        return work
    since, waiting_list = perf_counter_ns(), recorder.queued

    def run() -> Any:
        waiting_list[get_ident()] = since
        return work()

    return run
