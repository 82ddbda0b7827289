"""The progress of this process in training, for messages: task, epoch and update.

Independent of frameworks; callbacks report to it. The process has one record for all threads. Ranks
compare their records only after a fault.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from keras_dist._engine.tracing import spans


@dataclasses.dataclass
class Progress:
    """Progress of this process."""

    tasks: list[str] = dataclasses.field(default_factory=list)
    left: str = ""
    epoch: int | None = None
    updates: int = 0
    step: int | None = None
    steps: int | None = None
    epochs: int | None = None
    samples_per_step: float | None = None
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    done: int = 0
    repeats: bool = False

    @property
    def task(self) -> str:
        """The current task, such as `evaluate within fit`."""
        return " within ".join(reversed(self.tasks)) or (f"after {self.left}" if self.left else "")

    def begin(self) -> None:
        """Resets the record for an outermost task."""
        self.epoch, self.updates = None, 0
        self.step = self.steps = self.epochs = self.samples_per_step = None
        self.logs = {}


_progress = Progress()
_thread = threading.local()  # its tasks: threads may run fits at the same time


def progress() -> Progress:
    """Returns the record of this process, which keeps changing."""
    return _progress


@contextlib.contextmanager
def during(task: str) -> Iterator[None]:
    """Records a task, such as `"fit"`, possibly within another one."""
    if not _progress.tasks:
        _progress.begin()
    _progress.tasks.append(task)
    _own_tasks().append(task)
    with spans.task(task):
        try:
            yield
        finally:
            _progress.tasks.remove(task)
            _own_tasks().pop()
            if not _progress.tasks:
                spans.end_epoch()
                _progress.epoch, _progress.updates = None, 0
                _progress.left = task


def is_during(task: str) -> bool:
    """Returns whether a task runs."""
    return task in _progress.tasks


def is_nested(task: str) -> bool:
    """Returns whether a task of this thread runs within another one of the same name."""
    return _own_tasks().count(task) > 1


def _own_tasks() -> list[str]:
    tasks: list[str] = vars(_thread).setdefault("tasks", [])
    return tasks


def begin_epoch(epoch: int) -> None:
    """Records the start of an epoch, counted from 0, and resets its updates."""
    _progress.epoch, _progress.updates = epoch, 0
    spans.begin_epoch(epoch)


def count_update() -> None:
    """Counts a gradient reduction, unless it repeats the last one."""
    if _progress.repeats:
        _progress.repeats = False
        return
    _progress.updates += 1
    if _progress.step is None:
        _progress.done += 1
    spans.count_update()


def repeat_update() -> None:
    """Makes the next gradient reduction belong to the same update."""
    _progress.repeats = True


def note_step(step: int) -> None:
    """Records the number of steps of this epoch that have ended.

    Threads of Keras may report steps out of order.
    """
    before = _progress.step or 0
    if step > before:
        _progress.step = step
        _progress.done += step - before


def describe_progress() -> str:
    """Describes the progress, such as `in fit, epoch 3, update 57`, counted from 1.

    Epochs are counted as Keras prints them. Empty without a record.
    """
    now = _progress
    parts = [f"in {now.task}" if now.tasks else now.task] if now.task else []
    if now.epoch is not None:
        parts.append(f"epoch {now.epoch + 1}")
    if now.updates:
        parts.append(f"update {now.updates}")
    return ", ".join(parts)
