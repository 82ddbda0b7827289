"""The progress of this process in training, for messages: task, epoch and update.

Each thread that runs a task, such as `fit`, has a record of its own. Frameworks call the host in
other threads: the ranks among which these act tell whose record is meant. Ranks compare their
records only after a fault.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_dist._engine.tracing import spans


@dataclasses.dataclass(eq=False)
class Progress:
    """Progress of an outermost task and of those within it."""

    tasks: list[str] = dataclasses.field(default_factory=list)
    left: str = ""
    epoch: int | None = None
    updates: int = 0
    step: int | None = None
    steps: int | None = None
    epochs: int | None = None
    samples_per_step: float | None = None
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    repeats: bool = False

    @property
    def task(self) -> str:
        """The current task, such as `evaluate within fit`."""
        return " within ".join(reversed(self.tasks)) or (f"after {self.left}" if self.left else "")

    def describe(self) -> str:
        """Describes it as Keras counts, such as `in fit, epoch 3, update 57`; empty if unknown."""
        parts = [f"in {self.task}" if self.tasks else self.task] if self.task else []
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch + 1}")
        if self.updates:
            parts.append(f"update {self.updates}")
        return ", ".join(parts)


class _TasksOfProcess:
    """What all threads share."""

    def __init__(self) -> None:
        self.running: list[Progress] = []  # the latest last
        self.left = Progress()  # what is known without a task, or after the last one
        self.by_ranks: dict[tuple[int, ...], Progress] = {}
        self.done = 0


class _TasksOfThread(threading.local):
    """The record of the tasks of each thread, if it runs any."""

    progress: Progress | None = None


_process, _thread = _TasksOfProcess(), _TasksOfThread()


def progress(ranks: Sequence[int] = ()) -> Progress:
    """Returns the record of this thread's task; else that of these ranks, or of the latest task."""
    if _thread.progress is not None:
        return _thread.progress
    found = _process.by_ranks.get(tuple(ranks))
    if found is not None and found.tasks:
        return found
    return (list(_process.running) or [_process.left])[-1]


def acts_among(ranks: Sequence[int]) -> None:
    """Records that the task of this thread acts among ranks, also in threads of frameworks."""
    if _thread.progress is not None:
        _process.by_ranks[tuple(ranks)] = _thread.progress


def done() -> int:
    """Returns the number of steps, or updates of loops, that this process has done."""
    return _process.done


@contextlib.contextmanager
def during(task: str) -> Iterator[None]:
    """Records a task, such as `"fit"`, possibly within another one."""
    own = _thread.progress
    if own is None:
        own = _thread.progress = Progress()
        _process.running.append(own)
    own.tasks.append(task)
    with spans.task(task):
        try:
            yield
        finally:
            own.tasks.pop()
            if not own.tasks:
                spans.end_epoch()
                own.epoch, own.updates, own.left = None, 0, task
                _thread.progress, _process.left = None, own
                _process.running.remove(own)


def is_during(task: str) -> bool:
    """Returns whether a task runs, in any thread."""
    return any(task in each.tasks for each in list(_process.running))


def is_single() -> bool:
    """Returns whether at most one thread runs tasks."""
    return len(_process.running) < 2


def is_nested(task: str) -> bool:
    """Returns whether a task of this thread runs within another one of the same name."""
    return _thread.progress is not None and _thread.progress.tasks.count(task) > 1


def begin_epoch(epoch: int) -> None:
    """Records the start of an epoch, counted from 0, and resets its updates."""
    now = progress()
    now.epoch, now.updates = epoch, 0
    spans.begin_epoch(epoch)


def count_update(ranks: Sequence[int] = ()) -> None:
    """Counts a gradient reduction among ranks, unless it repeats the last one."""
    now = progress(ranks)
    if now.repeats:
        now.repeats = False
        return
    now.updates += 1
    if now.step is None:
        _process.done += 1
    spans.count_update()


def repeat_update(ranks: Sequence[int] = ()) -> None:
    """Makes the next gradient reduction among ranks belong to the same update."""
    progress(ranks).repeats = True


def note_step(step: int) -> None:
    """Records how many steps of this epoch have ended; threads of Keras report out of order."""
    now = progress()
    before = now.step or 0
    if step > before:
        now.step = step
        _process.done += step - before


def describe_progress(ranks: Sequence[int] = ()) -> str:
    """Describes the progress of the task that acts among ranks, see `progress`."""
    return progress(ranks).describe()
