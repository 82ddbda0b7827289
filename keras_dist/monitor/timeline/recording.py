"""Recording a timeline on all ranks: start, end, and merging of the recordings."""

import glob
import logging
import os
import platform
import secrets
import sys
import time
from typing import Any

from keras_dist import _engine, config, errors, runtime
from keras_dist.monitor.timeline.trace import begin_trace, complete, head_of, part_path, parts_of

MEGABYTE = 10**6

_log = logging.getLogger("keras_dist")


def begin_recording(
    comm: _engine.Communicator,
    path: str,
    steps: tuple[int, int | None] | None = None,
    mbytes: float | None = None,
) -> None:
    """Ends a timeline, if one runs, and starts one of about `mbytes`. Collective; blocks."""
    end_recording(comm)
    settings = config.settings()
    first, end = steps or settings.timeline_steps
    share = int((mbytes or settings.timeline_mbytes) * MEGABYTE / comm.size)
    stem, suffix = os.path.splitext(os.path.abspath(path))
    path = f"{stem}.restart{settings.restart}{suffix}" if settings.restart else stem + suffix
    job = _engine.collectives.broadcast_object(comm, secrets.token_hex(8), 0)
    offset, error = _engine.clock_offset(comm)
    head = {
        "job": job,
        "path": path,
        "rank": comm.rank,
        "host": platform.node(),
        "pid": os.getpid(),
        "started": time.time(),
        "clock": [time.perf_counter_ns(), offset, error],
    }
    trouble = None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if comm.rank == 0:
            for old in glob.glob(f"{glob.escape(path)}.rank*.part"):
                os.unlink(old)
            begin_trace(path, job)
    except OSError as failure:
        trouble = failure
    _raise_on_all(comm, path, trouble)
    try:
        _engine.tracing.start_trace(
            part_path(path, comm.rank), head, (first, end or sys.maxsize), share
        )
    except OSError as failure:
        trouble = failure
    try:
        _raise_on_all(comm, path, trouble)
    except errors.ArgumentError:
        _engine.tracing.stop_trace()
        raise


def end_recording(comm: _engine.Communicator) -> None:
    """Ends the timeline and writes it; a failure is a warning. Collective: every rank; blocks."""
    if not _engine.tracing.is_recording():
        return
    offset, error = _engine.clock_offset(comm)
    part = _engine.tracing.stop_trace(clock=[time.perf_counter_ns(), offset, error])
    if part is None:
        return
    path, job = part.head["path"], part.head["job"]
    try:
        is_mine = _merge(comm, part)
        if comm.rank == 0:
            _report_size(path, complete(path, job))
            for file in parts_of(path, job):
                os.unlink(file)
        elif not is_mine:
            os.unlink(part.path)
    except (OSError, errors.DataError) as failure:
        _log.warning(
            "keras_dist cannot write the timeline %s: %s. `keras-dist timeline %s` puts together "
            "what the ranks have recorded.",
            path,
            failure,
            path,
        )


def _merge(comm: _engine.Communicator, part: _engine.tracing.TraceWriter) -> bool:
    """Sends the root the recordings that it cannot read. Collective."""
    path, job, me = part.head["path"], part.head["job"], part.head["rank"]
    owners = _engine.collectives.allgather_object(comm, me)  # numbers of before a loss of ranks
    seen = [head_of(part_path(path, owner)).get("job") == job for owner in owners]
    seen = _engine.collectives.broadcast_object(comm, seen, 0)
    trouble = None
    for place, owner in enumerate(owners):
        if seen[place]:
            continue
        content = _engine.collectives.broadcast_object(
            comm, _read(part.path) if owner == me else b"", place
        )
        if comm.rank == 0 and content:
            try:
                with open(_engine.tracing.open_trace(part_path(path, owner)), "wb") as file:
                    file.write(content)
            except OSError as failure:  # the other ranks wait for the rest
                trouble = trouble or failure
    if trouble is not None:
        raise trouble
    return seen[comm.rank]


def _raise_on_all(comm: _engine.Communicator, path: str, trouble: OSError | None) -> None:
    text = None if trouble is None else f"{trouble} on {platform.node()}"
    everyone = _engine.collectives.allgather_object(comm, text)
    found = [(rank, text) for rank, text in enumerate(everyone) if text is not None]
    if found:
        rank, text = found[0]
        where = f"[rank {rank} of {comm.size}]"
        remedy = "Pass a file in a writable directory: KERAS_DIST_TIMELINE=..."
        expected = f"to write a timeline to {path}"
        raise errors.ArgumentError(where, expected, text, remedy)


def _report_size(path: str, ranks: list[dict[str, Any]]) -> None:
    _log.info("keras_dist has written the timeline %s", path)
    full = [rank for rank in ranks if rank["full_at_step"] is not None]
    if full:
        text = ", ".join(f"rank {rank['rank']} at step {rank['full_at_step']}" for rank in full)
        _log.warning("keras_dist: the timeline %s reached its size and ends: %s.", path, text)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # the other ranks wait
        return b""


def start_timeline(
    file_path: str | os.PathLike[str],
    mark_cycles: bool = False,
    steps: tuple[int, int | None] | None = None,
    mbytes: float | None = None,
) -> None:
    """Starts recording a timeline of every rank, in the trace format of Chrome and Perfetto.

    A timeline that is already recorded is ended and written first. The timeline ends at
    `stop_timeline`, `shutdown` or the end of the script. Unlike in Horovod, no environment variable
    is required.

    Collective: every rank of the job, with the same arguments; blocks.

    Args:
        file_path: path of the trace, which the root writes. Each rank records to a file in the
            same directory, which is removed at the end.
        mark_cycles: accepted for compatibility with Horovod; keras_dist has no cycles. Defaults
            to `False`.
        steps: first recorded step, counted from 0 at this call, and the step before which
            recording ends, or `None`. Defaults to `KERAS_DIST_TIMELINE_STEPS`: all steps.
        mbytes: approximate size of the trace in MB at which recording ends, divided among the
            ranks. Defaults to `KERAS_DIST_TIMELINE_MBYTES`: 100.

    Raises:
        ArgumentError: a rank cannot write there, which is raised on every rank; or `steps` or
            `mbytes` are invalid.

    Example:
    ```python
    keras_dist.start_timeline("timeline.json", steps=(100, 200))
    model.fit(dataset, epochs=2)
    keras_dist.stop_timeline()
    ```
    """
    comm = runtime.communicator()
    first, end = steps or (0, None)
    if first < 0 or (end is not None and end <= first):
        received, expected = f"steps={steps!r}", "steps to be (first, end) with 0 <= first < end"
    elif mbytes is not None and mbytes <= 0:
        received, expected = f"mbytes={mbytes!r}", "a size of the timeline over 0 MB"
    else:
        begin_recording(comm, os.fspath(file_path), steps, mbytes)
        return
    remedy = "Leave it out to record all."
    raise errors.ArgumentError(runtime.where(), expected, received, remedy)


def stop_timeline() -> None:
    """Ends the timeline and writes the trace; does nothing if no timeline is recorded.

    The root merges the recordings of all ranks; ranks of other nodes send theirs to the root.

    Collective: every rank of the job; blocks.
    """
    end_recording(runtime.communicator())
