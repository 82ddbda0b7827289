"""`keras-dist timeline`: summarizes the timeline of a job."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from keras_dist import errors
from keras_dist.monitor.timeline.summary import KINDS, Operation, Shares, Summary, summarise

COLOURS = {
    "compute": "green",
    "wait": "red",
    "transfer": "blue",
    "queued": "magenta",
    "other": "bright_black",
}
BAR = 20
MOST_OPERATIONS = 20
PHASES = {
    "wait": ("wait for ranks",),
    "in": ("copy in",),
    "reduce": ("reduce", "wait for slices"),
    "send": ("cross-node", "reduce through MPI", "transfer"),
    "out": ("copy out",),
}


def add_to(commands: Any, name: str) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        name,
        description="Summarizes the time of a job from its timeline (KERAS_DIST_TIMELINE), and "
        "merges the recordings of the ranks if the job was killed.",
    )
    parser.set_defaults(act=_summarise)
    parser.add_argument("files", nargs="+", metavar="FILE", help="timeline of a job")
    parser.add_argument("--html", metavar="FILE", help="write the tables to an HTML page")
    parser.add_argument("--png", metavar="FILE", help="draw a figure (requires matplotlib)")


def _summarise(options: argparse.Namespace) -> int:
    summaries = [(path, summarise(path)) for path in options.files]
    try:
        console = Console()
        for path, summary in summaries:
            console.print(_report(path, summary))
        if options.html:
            _save_html(summaries, options.html)
        if options.png:
            _save_png(summaries, options.png)
    except (OSError, ImportError) as error:
        remedy = (
            "Pass another file, or install the requirements: pip install 'keras_dist[timeline]'"
        )
        expected = "to print the timeline, and to write the files of --html and --png"
        raise errors.ArgumentError("[keras-dist timeline]", expected, str(error), remedy) from None
    return 0


def _save_html(summaries: Iterable[tuple[str, Summary]], path: str) -> None:
    """Writes the tables as a web page without external resources."""
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=140, file=nowhere)
        for name, summary in summaries:
            console.print(_report(name, summary))
        console.save_html(path)


def _report(name: str, summary: Summary) -> Group:
    parts: list[Any] = [Text(f"\n{name}: {len(summary.ranks)} ranks", style="bold"), _legend()]
    hosts = {metadata["rank"]: metadata["host"] for metadata in summary.about}
    rows = [(f"{rank} on {hosts[rank]}", shares) for rank, shares in summary.ranks.items()]
    parts.append(_shares("rank", rows))
    if summary.epochs:
        rows = [(str(number), shares) for number, shares in summary.epochs]
        parts.append(_shares("epoch (of ranks)", rows))
    if summary.operations:
        parts.append(_operations(summary.operations, max(1, len(summary.ranks))))
    return Group(*parts, *_notes(summary))


def _legend() -> Text:
    text = Text()
    for kind in KINDS:
        text.append(f" {kind} ", style=f"white on {COLOURS[kind]}")
    return text


def _shares(title: str, rows: Iterable[tuple[str, Shares]]) -> Table:
    table = _table()
    table.add_column(title, no_wrap=True, overflow="ellipsis", max_width=18)
    for head in ("s", *KINDS):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=BAR)
    for name, shares in rows:
        cells = [f"{shares.part(kind):.1%}" for kind in KINDS]
        table.add_row(Text(name), f"{shares.total:.2f}", *cells, _bar(shares))
    return table


def _bar(shares: Shares) -> Text:
    text = Text()
    done = drawn = 0.0
    for kind in KINDS:
        done += shares.part(kind) * BAR
        width = round(done) - round(drawn)
        text.append("█" * width, style=COLOURS[kind])
        drawn = done
    return text


def _operations(operations: list[Operation], ranks: int) -> Table:
    table = _table(title="operations: ms of a call, mean; in and out are copies")
    table.add_column("operation", no_wrap=True, overflow="ellipsis", max_width=20)
    for head in ("calls", "MB", "all", "queue", *PHASES, "GB/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for operation in operations[:MOST_OPERATIONS]:
        table.add_row(
            Text(operation.name),  # brackets would be markup
            str(round(operation.calls / ranks)),
            _format_number(operation.nbytes / operation.calls / 1e6),
            *(_ms(seconds, operation.calls) for seconds in (operation.seconds, operation.queued)),
            *(
                _ms(sum(operation.phases.get(name, 0.0) for name in names), operation.calls)
                for names in PHASES.values()
            ),
            _format_number(operation.speed) if operation.nbytes else "",
        )
    if len(operations) > MOST_OPERATIONS:
        table.caption = f"and {len(operations) - MOST_OPERATIONS} more, which took less"
    return table


def _table(title: str | None = None) -> Table:
    """Returns an empty table for a terminal of 80 columns."""
    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))


def _ms(seconds: float, calls: int) -> str:
    return _format_number(seconds / calls * 1e3) if seconds else ""


def _format_number(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3f}" if number < 1 else f"{number:.3g}"


def _notes(summary: Summary) -> list[Text]:
    remarks = []
    if summary.slowest is not None:
        rank, meetings = summary.slowest, sum(summary.last.values())
        remarks.append(
            f"Slowest: rank {rank}. It came last to {summary.last.get(rank, 0)} of {meetings} "
            f"meetings; the others waited {summary.waited_for[rank]:.2f} s for it, all together."
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
    return [Text(remark) for remark in remarks]


def _save_png(summaries: Sequence[tuple[str, Summary]], path: str) -> None:
    """Draws how each rank and each epoch spent its time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2 * len(summaries)), layout="constrained")
    for row, (name, summary) in zip(
        figure.subplots(len(summaries), 2, squeeze=False), summaries, strict=True
    ):
        ranks = [(f"rank {rank}", shares) for rank, shares in summary.ranks.items()]
        epochs = [(f"epoch {number}", shares) for number, shares in summary.epochs]
        for axis, bars, of in zip(row, (ranks, epochs), ("rank", "epoch"), strict=True):
            _draw(axis, bars)
            axis.set_title(f"{name}, by {of}", fontsize=10)
        row[0].legend(ncols=len(KINDS), fontsize=7, loc="lower left")
    figure.savefig(path, format="png", dpi=110)


def _draw(axis: Any, bars: list[tuple[str, Shares]]) -> None:
    left = [0.0] * len(bars)
    for kind in KINDS:
        seconds = [getattr(shares, kind) for _, shares in bars]
        colour = COLOURS[kind].removeprefix("bright_").replace("black", "lightgrey")
        axis.barh([name for name, _ in bars], seconds, left=left, color=colour, label=kind)
        left = [low + more for low, more in zip(left, seconds, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("s")
