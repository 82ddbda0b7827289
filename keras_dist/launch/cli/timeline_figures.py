"""The page and the figure of `keras-dist timeline`."""

import html
import itertools
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from keras_dist.launch.cli.timeline_contents import UNITS, TimelineTable, notes, tables
from keras_dist.monitor.timeline.summary import KINDS, Summary

PAGE = Path(__file__).with_name("timeline.html")
# Distinct to the colour-blind, and on a light and a dark page.
COLOURS = {
    "compute": "#3b7dd8",
    "wait": "#d07a00",
    "transfer": "#8f63c8",
    "queued": "#c44f86",
    "other": "#8a929e",
}


def save_html(summaries: Iterable[tuple[str, Summary]], path: str) -> None:
    """Writes figures and tables as a page without scripts and external resources."""
    names = ", ".join(name for name, _ in summaries)
    page = string.Template(PAGE.read_text()).substitute(
        title=html.escape(f"Timeline of {names}"),
        colours=" ".join(f"--{kind}: {colour};" for kind, colour in COLOURS.items()),
        legend="".join(
            f'<li><i style="--c:var(--{kind})"></i> <b>{kind}</b> {text}'
            for kind, text in KINDS.items()
        ),
        jobs="\n".join(_job(name, summary) for name, summary in summaries),
    )
    Path(path).write_text(page, encoding="utf-8")


def _job(name: str, summary: Summary) -> str:
    title = html.escape(f"{name}: {len(summary.ranks)} ranks")
    remarks = "".join(f"<li>{html.escape(note)}" for note in notes(summary))
    drawn = "\n".join(map(_table, tables(summary)))
    return f"<h1>{title}</h1>\n<ul>{remarks}</ul>\n{drawn}"


def _table(found: TimelineTable) -> str:
    caption = html.escape(", ".join(filter(None, [found.caption, found.left_out])))
    heads = "".join(f'<th scope="col">{html.escape(text)}' for text in found.head)
    longest = max((shares.total for shares in found.shares), default=0.0) or 1.0
    body = []
    for (name, *cells), shares in itertools.zip_longest(found.rows, found.shares):
        others = "".join(f"<td>{html.escape(cell)}" for cell in cells)
        body.append(f'<tbody><tr><th scope="row">{html.escape(name)}{others}')
        if shares is not None:
            widths = {kind: 100 * getattr(shares, kind) / longest for kind in KINDS}
            bars = "".join(
                f'<i style="width:{width:.2f}%;--c:var(--{kind})"></i>'
                for kind, width in widths.items()
            )
            # Screen readers have the row above.
            body.append(f'<tr aria-hidden="true"><td colspan="{len(found.head)}"><div>{bars}</div>')
    # The keyboard scrolls what is wider than the screen.
    return (
        f'<div class="card {"" if found.shares else "wide"}" role="region" tabindex="0" '
        f'aria-label="{caption}"><table><caption>{caption}</caption><thead><tr>{heads}'
        + "\n".join(body)
        + "</table></div>"
    )


def save_png(summaries: Sequence[tuple[str, Summary]], path: str) -> None:
    """Draws the time of steps, of ranks and of epochs."""
    from matplotlib.figure import Figure

    every = [
        (name, [found for found in tables(summary) if found.shares]) for name, summary in summaries
    ]
    columns = max(1, *(len(found) for _, found in every))
    bars = max((len(panel.rows) for _, found in every for panel in found), default=0)
    size = 4.5 * columns, max(3, 0.2 * bars) * len(every)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(every), columns, squeeze=False)
    for row, (name, panels) in zip(axes, every, strict=True):
        for axis, found in zip(row, panels, strict=False):
            _draw(axis, found)
            axis.set_title(f"{name}, {found.head[0]}", fontsize=10)
        for axis in row[len(panels) :]:
            axis.set_axis_off()
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), ncols=len(KINDS), loc="outside lower center"
    )
    figure.savefig(path, format="png", dpi=110)


def _draw(axis: Any, found: TimelineTable) -> None:
    names, unit = [name for name, *_ in found.rows], found.head[1]
    left = [0.0] * len(names)
    for kind in KINDS:
        times = [getattr(shares, kind) * UNITS[unit] for shares in found.shares]
        axis.barh(names, times, left=left, color=COLOURS[kind], label=kind)
        left = [low + more for low, more in zip(left, times, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel(unit)
