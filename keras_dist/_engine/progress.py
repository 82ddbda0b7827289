"""How far this process is: in fit or evaluate, in which epoch and update. Words for messages.

Knows no framework: who does tells it. One record for the process, whichever thread asks; it
is not compared between the ranks before something is wrong.
"""

import contextlib
from collections.abc import Iterator

from keras_dist._engine import timeline

__all__ = ["begin_epoch", "count_update", "during", "is_during", "say_progress"]


class _Progress:
    def __init__(self) -> None:
        self.tasks: list[str] = []  # the outermost first
        self.left = ""  # the last outermost task, when there is none
        self.begin()

    def begin(self) -> None:
        self.epoch: int | None = None
        self.updates = 0


_progress = _Progress()


@contextlib.contextmanager
def during(task: str) -> Iterator[None]:
    """Notes that the process is in a task, such as `"fit"`, perhaps within another one."""
    if not _progress.tasks:
        _progress.begin()
    _progress.tasks.append(task)
    with timeline.task(task):
        try:
            yield
        finally:
            _progress.tasks.remove(task)
            if not _progress.tasks:
                timeline.end_epoch()
                _progress.begin()
                _progress.left = task


def is_during(task: str) -> bool:
    """Tells whether the process is in a task."""
    return task in _progress.tasks


def begin_epoch(epoch: int) -> None:
    """Notes that an epoch begins, counted from 0; updates are counted anew."""
    _progress.epoch, _progress.updates = epoch, 0
    timeline.begin_epoch(epoch)


def count_update() -> None:
    """Notes that gradients are about to be reduced."""
    _progress.updates += 1
    timeline.count_update()


def say_progress() -> str:
    """Says where this process is, such as `in fit, epoch 3, update 57`, counted from 1.

    Epochs are counted as Keras prints them. Empty when nobody has said anything.
    """
    now = _progress
    parts = [f"in {' within '.join(reversed(now.tasks))}"] if now.tasks else []
    if now.left and not now.tasks:
        parts.append(f"after {now.left}")
    if now.epoch is not None:
        parts.append(f"epoch {now.epoch + 1}")
    if now.updates:
        parts.append(f"update {now.updates}")
    return ", ".join(parts)
