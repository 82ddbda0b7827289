"""The trace of all ranks, in the trace event format of Chrome.

A rank is a process of the trace. Recordings are read several times, so that memory does not grow
with the number of events.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keras_dist.monitor.timeline.rank_events import Arrivals, RankEvents
from keras_dist.monitor.timeline.rank_traces import parts_of
from keras_dist.storage import atomic_write

KEY = "keras_dist"  # key in `otherData`


def begin_trace(path: str, job: str) -> None:
    """Writes an empty trace with the id of the job."""
    text = "The job has not ended, or was killed: keras-dist timeline puts its parts together"
    event = {"name": text, "ph": "i", "s": "g", "ts": 0, "pid": 0, "tid": 0}
    _write(path, {"job": job, "complete": False}, [json.dumps(event)])


def complete(path: str, job: str, by_reader: bool = False) -> list[dict[str, Any]]:
    """Writes the trace of a job from its recordings, which stay, because the job may be running.

    The file at `path` is replaced atomically.
    """
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


def _last_arrivals(ranks: Iterable[RankEvents]) -> Arrivals:
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
