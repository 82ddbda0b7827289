"""`start_timeline` and `stop_timeline` for scripts."""

import os

from keras_dist import errors, runtime
from keras_dist.monitor.timeline.recording import begin_recording, end_recording


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
