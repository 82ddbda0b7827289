"""One trace of the parts of all ranks, in the trace event format of Chrome. Pure.

A rank is a process of the trace, its lanes are threads. The parts are read several times, so that
what is held does not grow with the number of events.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keras_dist.monitor.timeline.rank_events import Meetings, RankEvents
from keras_dist.monitor.timeline.rank_traces import parts_of
from keras_dist.storage import atomic_write

__all__ = ["KEY", "begin_trace", "complete"]

KEY = "keras_dist"  # of what `otherData` says of the job


def begin_trace(path: str, job: str) -> None:
    """Writes a trace without events, which says whose parts belong to it."""
    text = "The job has not ended, or was killed: keras-dist timeline puts its parts together"
    event = {"name": text, "ph": "i", "s": "g", "ts": 0, "pid": 0, "tid": 0}
    _write(path, {"job": job, "complete": False}, [json.dumps(event)])


def complete(path: str, job: str, by_reader: bool = False) -> list[dict[str, Any]]:
    """Makes the trace of a job of its parts, which stay: it may still be running.

    At each moment the file at `path` is a whole trace: the one before or this one.

    Args:
        path: the trace.
        job: by what its parts are known.
        by_reader: whether the job itself may do so at the same time: its trace is then left.
            Defaults to `False`.

    Returns:
        What the ranks say of themselves, see `RankEvents.said`.

    Raises:
        DataError: a part is damaged.
        OSError: it cannot be written.
    """
    ranks = [RankEvents(part) for part in parts_of(path, job)]
    start = min((rank.first for rank in ranks), default=0)
    last = _who_came_last(ranks)
    about = [rank.said for rank in ranks]
    started = min((rank.head["started"] for rank in ranks), default=0)
    whole = bool(about) and all(one["ended"] for one in about)
    said = {"job": job, "complete": whole, "started": started, "ranks": about}
    events = itertools.chain.from_iterable(one.events(start, last) for one in ranks)
    # The root removes the parts when it has written the whole.
    _write(path, said, events, lambda: not by_reader or bool(parts_of(path, job)))
    return about


def _who_came_last(ranks: Iterable[RankEvents]) -> Meetings:
    last: Meetings = {}
    for rank in ranks:
        for meeting, at in rank.arrivals():
            if meeting not in last or last[meeting][0] < at:
                last[meeting] = at, rank.rank
    return last


def _write(
    path: str,
    said: Mapping[str, Any],
    events: Iterable[str],
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    with atomic_write.beside(pathlib.Path(path)) as whole:
        with whole.open("x") as file:
            other = json.dumps({KEY: said})
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write(f",\n{event}" if number else event)
            file.write("\n]}\n")
        if is_wanted():
            # Not `whole_files.move`: while it waits for the disk the root may write its own.
            os.replace(whole, path)
