"""The summary of a timeline as a figure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_dist.monitor.timeline.summary import KINDS, Shares, Summary
from keras_dist.monitor.timeline.tables import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_png(summaries: Sequence[tuple[str, Summary]], path: str) -> None:
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


def _draw(axis: "Axes", bars: list[tuple[str, Shares]]) -> None:
    left = [0.0] * len(bars)
    for kind in KINDS:
        seconds = [getattr(shares, kind) for _, shares in bars]
        colour = COLOURS[kind].removeprefix("bright_").replace("black", "lightgrey")
        axis.barh([name for name, _ in bars], seconds, left=left, color=colour, label=kind)
        left = [low + more for low, more in zip(left, seconds, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("s")
