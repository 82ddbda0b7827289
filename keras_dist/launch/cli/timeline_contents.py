"""What `keras-dist timeline` says of a job, in the terminal and on a page alike."""

import dataclasses
from collections.abc import Sequence

from keras_dist.monitor.timeline.summary import KINDS, Shares, Summary

MOST_OPERATIONS = 20
PHASES = {
    "wait": ("wait for ranks",),
    "in": ("copy in", "find rows"),
    "reduce": ("reduce", "wait for slices"),
    "send": ("cross-node", "reduce through MPI", "transfer"),
    "out": ("copy out",),
}
UNITS = {"s": 1.0, "ms": 1e3}


@dataclasses.dataclass
class TimelineTable:
    """A table, whose rows begin with a name; the shares of a row, if any, are drawn as a bar."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    shares: Sequence[Shares] = ()
    left_out: str = ""


def tables(summary: Summary) -> list[TimelineTable]:
    """Returns the time of steps, of the recording, of epochs and operations, if there are any."""
    hosts = {metadata["rank"]: metadata["host"] for metadata in summary.about}

    def by_rank(found: dict[int, Shares]) -> list[tuple[str, Shares]]:
        return [(f"{rank} on {hosts[rank]}", shares) for rank, shares in found.items()]

    epochs = [(str(number), shares) for number, shares in summary.epochs]
    typical = "A step of each rank, the mean of the middle half by duration"
    every = [
        _times(typical, "step of rank", "ms", by_rank(summary.steps)),
        _times("The whole recording, by rank", "rank", "s", by_rank(summary.ranks)),
        _times("Epochs, the mean of all ranks", "epoch (of ranks)", "s", epochs),
        _operations(summary),
    ]
    return [found for found in every if found.rows]


def _times(caption: str, of: str, unit: str, found: Sequence[tuple[str, Shares]]) -> TimelineTable:
    """Returns how ranks spent their time in periods, of which each has a name."""
    rows = [
        [
            name,
            f"{shares.total * UNITS[unit]:.2f}",
            *(f"{shares.part(kind):.1%}" for kind in KINDS),
        ]
        for name, shares in found
    ]
    return TimelineTable(caption, [of, unit, *KINDS], rows, [shares for _, shares in found])


def _operations(summary: Summary) -> TimelineTable:
    """Returns the operations that took most of the time, the mean call of each."""
    rows, ranks = [], max(1, len(summary.ranks))
    for operation in summary.operations[:MOST_OPERATIONS]:
        times = [operation.seconds, operation.queued]
        times += [sum(operation.phases.get(n, 0.0) for n in names) for names in PHASES.values()]
        rows.append(
            [
                operation.name,
                str(round(operation.calls / ranks)),
                _format_number(operation.nbytes / operation.calls / 1e6),
                *(_format_number(t / operation.calls * 1e3) if t else "" for t in times),
                _format_number(operation.speed) if operation.nbytes else "",
            ]
        )
    more = len(summary.operations) - MOST_OPERATIONS
    return TimelineTable(
        "Operations: ms of a call, mean; in and out are copies",
        ["operation", "calls", "MB", "all", "queue", *PHASES, "GB/s"],
        rows,
        left_out=f"and {more} more, which took less" if more > 0 else "",
    )


def notes(summary: Summary) -> list[str]:
    """Returns sentences on the slowest rank, the clocks, and recordings that ended early."""
    remarks = []
    if summary.slowest is not None:
        rank, collectives = summary.slowest, sum(summary.last.values())
        remarks.append(
            f"Slowest: rank {rank}. It came last to {summary.last.get(rank, 0)} of {collectives} "
            f"collectives; the others waited {summary.waited_for[rank]:.2f} s for it, all together."
        )
    error = max((max(metadata["clock_error_us"]) for metadata in summary.about), default=0.0)
    remarks.append(f"Clocks of the ranks agree within {error:.0f} us.")
    for metadata in summary.about:
        if metadata["full_at_step"] is not None:
            remarks.append(
                f"Rank {metadata['rank']} ends at step {metadata['full_at_step']}: size limit."
            )
        if not metadata["ended"]:
            remarks.append(f"Rank {metadata['rank']} did not end its recording: it was killed.")
    return remarks


def _format_number(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3f}" if number < 1 else f"{number:.3g}"
