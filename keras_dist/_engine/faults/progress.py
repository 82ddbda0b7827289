"""How far this process is: in fit or evaluate, in which epoch and update. Words for messages.

Knows no framework: who does tells it. One record for the process, whichever thread asks; it
is not compared between the ranks before something is wrong.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from keras_dist._engine.tracing import spans

__all__ = [
    "Progress",
    "begin_epoch",
    "count_update",
    "during",
    "is_during",
    "note_step",
    "progress",
    "say_progress",
]


@dataclasses.dataclass
class Progress:
    """How far this process is.

    Args:
        tasks: such as `"fit"`, the outermost first.
        left: the last outermost task, when there is none.
        epoch: that it is in, from 0.
        updates: reductions of gradients in this epoch.
        step: steps of this epoch that have ended, where a callback counts them.
        steps: how many the epoch has, where Keras knows.
        epochs: up to which one is trained.
        samples_per_step: of this process, in the last epoch that has ended.
        logs: what Keras last said of metrics.
        done: steps since the process began; updates where no callback counts steps.
    """

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

    @property
    def task(self) -> str:
        """Says what this process does, such as `evaluate within fit`."""
        return " within ".join(reversed(self.tasks)) or (f"after {self.left}" if self.left else "")

    def begin(self) -> None:
        """Begins an outermost task."""
        self.epoch, self.updates = None, 0
        self.step = self.steps = self.epochs = self.samples_per_step = None
        self.logs = {}


_progress = Progress()


def progress() -> Progress:
    """Returns the record of this process, which goes on changing."""
    return _progress


@contextlib.contextmanager
def during(task: str) -> Iterator[None]:
    """Notes that the process is in a task, such as `"fit"`, perhaps within another one."""
    if not _progress.tasks:
        _progress.begin()
    _progress.tasks.append(task)
    with spans.task(task):
        try:
            yield
        finally:
            _progress.tasks.remove(task)
            if not _progress.tasks:
                spans.end_epoch()
                _progress.epoch, _progress.updates = None, 0
                _progress.left = task


def is_during(task: str) -> bool:
    """Tells whether the process is in a task."""
    return task in _progress.tasks


def begin_epoch(epoch: int) -> None:
    """Notes that an epoch begins, counted from 0; updates are counted anew."""
    _progress.epoch, _progress.updates = epoch, 0
    spans.begin_epoch(epoch)


def count_update() -> None:
    """Notes that gradients are about to be reduced."""
    _progress.updates += 1
    if _progress.step is None:
        _progress.done += 1
    spans.count_update()


def note_step(step: int) -> None:
    """Notes how many steps of this epoch have ended.

    Several threads of Keras may come, one for a later step before another.
    """
    before = _progress.step or 0
    if step > before:
        _progress.step = step
        _progress.done += step - before


def say_progress() -> str:
    """Says where this process is, such as `in fit, epoch 3, update 57`, counted from 1.

    Epochs are counted as Keras prints them. Empty when nobody has said anything.
    """
    now = _progress
    parts = [f"in {now.task}" if now.tasks else now.task] if now.task else []
    if now.epoch is not None:
        parts.append(f"epoch {now.epoch + 1}")
    if now.updates:
        parts.append(f"update {now.updates}")
    return ", ".join(parts)
