"""Beginning and ending a timeline from a script."""

import os

from keras_dist import errors, runtime
from keras_dist.monitor.timeline.recording import begin_recording, end_recording

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(
    file_path: str | os.PathLike[str],
    mark_cycles: bool = False,
    steps: tuple[int, int | None] | None = None,
    mbytes: float | None = None,
) -> None:
    """Begins to record what every rank does, for a trace that Chrome and Perfetto open.

    A timeline that is being recorded ends and is written first. This one ends at
    `stop_timeline`, `shutdown` or the end of the script. Unlike in Horovod no variable needs to be
    set before.

    Collective: every rank of the job, with the same arguments; blocks.

    Args:
        file_path: where the root writes the trace. Each rank records beside it, in a file that
            is removed in the end.
        mark_cycles: accepted for the sake of scripts that know Horovod; there are no cycles
            here. Defaults to `False`.
        steps: the first step that is recorded, counted from 0 at this call, and the one before
            which recording ends, or `None`. Defaults to `KERAS_DIST_TIMELINE_STEPS`: all.
        mbytes: the size at which recording ends, in MB of the whole trace, about; it is shared
            out over the ranks. Defaults to `KERAS_DIST_TIMELINE_MBYTES`: 100.

    Raises:
        ArgumentError: a rank cannot write there, or `steps` or `mbytes` make no sense; the
            former is raised on every rank.

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
    raise errors.ArgumentError(errors.explain(runtime.where(), expected, received, remedy))


def stop_timeline() -> None:
    """Ends the timeline and writes it; does nothing when none is recorded.

    The root puts together what all ranks have recorded; ranks of other nodes send it theirs.

    Collective: every rank of the job; blocks.
    """
    end_recording(runtime.communicator())
