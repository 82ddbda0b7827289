"""`keras-dist timeline`: summarizes the timeline of a job."""

import argparse
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from keras_dist import errors
from keras_dist.launch.cli.timeline_contents import TimelineTable, notes, tables
from keras_dist.launch.cli.timeline_figures import COLOURS, save_html, save_png
from keras_dist.monitor.timeline.summary import KINDS, Shares, Summary, summarise

BAR = 20


def add_to(commands: Any, name: str) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        name,
        description="Summarizes the time of a job from its timeline (KERAS_DIST_TIMELINE), and "
        "merges the recordings of the ranks if the job was killed.",
    )
    parser.set_defaults(act=_summarise)
    parser.add_argument("files", nargs="+", metavar="FILE", help="timeline of a job")
    parser.add_argument("--html", metavar="FILE", help="write a page with figures and tables")
    parser.add_argument("--png", metavar="FILE", help="draw a figure (requires matplotlib)")


def _summarise(options: argparse.Namespace) -> int:
    summaries = [(path, summarise(path)) for path in options.files]
    try:
        console = Console()
        for path, summary in summaries:
            console.print(_report(path, summary))
        if options.html:
            save_html(summaries, options.html)
        if options.png:
            save_png(summaries, options.png)
    except ImportError as error:
        remedy = "Install it: pip install 'keras_dist[timeline]', or use --html, which needs none."
        expected = "matplotlib, which draws the figure of --png"
        raise errors.ArgumentError("[keras-dist timeline]", expected, str(error), remedy) from None
    except OSError as error:
        expected = "to print the timeline, and to write the files of --html and --png"
        remedy = "Pass another file."
        raise errors.ArgumentError("[keras-dist timeline]", expected, str(error), remedy) from None
    return 0


def _report(name: str, summary: Summary) -> Group:
    legend = (Text("██ ", style=COLOURS[kind]).append(kind, "default") for kind in KINDS)
    title = Text(f"\n{name}: {len(summary.ranks)} ranks", style="bold")
    drawn = map(_drawn, tables(summary))
    return Group(title, Text("  ").join(legend), *drawn, *map(Text, notes(summary)))


def _drawn(found: TimelineTable) -> Table:
    """Returns a table for a terminal of 80 columns."""
    table = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(
        found.head[0], no_wrap=True, overflow="ellipsis", max_width=18 if found.shares else 20
    )
    for head in found.head[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    if found.shares:
        table.add_column("", no_wrap=True, min_width=BAR)
    else:
        table.title, table.caption = found.caption, found.left_out or None
    for number, row in enumerate(found.rows):
        bar = [_bar(found.shares[number])] if found.shares else []
        table.add_row(*map(Text, row), *bar)  # brackets would be markup
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
