"""What the caller sees while ranks run: what the root prints, and a table of all."""

import codecs
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from keras_dist.interactive.exchange import Exchange

__all__ = ["View", "open_view"]

TABLE_SECONDS = 0.5


class View:
    """Shows what the root prints.

    Args:
        exchange: where it is found.
        np: the number of ranks.
    """

    def __init__(self, exchange: Exchange, np: int):
        self._exchange, self._np = exchange, np
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read = 0
        self._next_table = 0.0

    def show(self) -> None:
        """Shows what is new."""
        with contextlib.suppress(FileNotFoundError), self._exchange.log(0).open("rb") as log:
            log.seek(self._read)
            new = log.read()
            self._read += len(new)
            if new:
                self.write(self._decoder.decode(new))
        if time.monotonic() >= self._next_table:
            self._next_table = time.monotonic() + TABLE_SECONDS
            self.tabulate()

    def write(self, text: str) -> None:
        """Shows text."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def tabulate(self) -> None:
        """Shows the table, where there is a place for it."""

    def table(self) -> Any:
        """Returns the table of ranks, for rich."""
        from rich.table import Table

        table = Table(box=None, header_style="dim", pad_edge=False)
        for name in ("rank", "host", "pid", "state", "step", "samples/s", "memory", "GPU"):
            table.add_column(name, justify="left" if name in ("host", "state") else "right")
        for rank in range(self._np):
            table.add_row(str(rank), *_cells(self._exchange.report(rank)))
        return table


class _InNotebook(View):
    """The table stands above the text and is changed in its place."""

    def __init__(self, exchange: Exchange, np: int):
        super().__init__(exchange, np)
        self._handle: Any = None

    def tabulate(self) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(self.table(), display_id=True)
        else:
            self._handle.update(self.table())


class _InTerminal(View):
    """The table stands below the text, with the line between them that has not ended yet."""

    def __init__(self, exchange: Exchange, np: int, live: Any):
        super().__init__(exchange, np)
        self._live, self._line = live, ""

    def write(self, text: str) -> None:
        from rich.text import Text

        *whole, rest = (self._line + text).split("\n")
        for line in whole:
            self._live.console.print(Text.from_ansi(_as_shown(line)), soft_wrap=True)
        self._line = _as_shown(rest)
        self.tabulate()

    def tabulate(self) -> None:
        from rich.console import Group
        from rich.text import Text

        line = [Text.from_ansi(self._line)] if self._line else []
        self._live.update(Group(*line, self.table()), refresh=True)


@contextlib.contextmanager
def open_view(exchange: Exchange, np: int, verbose: bool) -> Iterator[View]:
    """Gives the view that fits where this process prints to.

    Args:
        exchange: with the ranks.
        np: the number of ranks.
        verbose: whether anything is shown.
    """
    if not verbose:
        yield _Nothing(exchange, np)
        return
    from rich import get_console
    from rich.live import Live

    console = get_console()
    if console.is_jupyter:
        yield _InNotebook(exchange, np)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield _InTerminal(exchange, np, live)
    else:
        yield View(exchange, np)


class _Nothing(View):
    def show(self) -> None:
        pass


def _cells(report: dict[str, Any]) -> list[str]:
    speed, memory, gpu = (report.get(key) for key in ("samples_per_second", "memory_nbytes", "gpu"))
    return [
        str(report.get("host", "")),
        str(report.get("pid", "")),
        str(report.get("state", "starting")),
        "",
        "" if speed is None else f"{speed:,.0f}",
        "" if memory is None else f"{memory / 2**30:.1f} GiB",
        "" if gpu is None else f"{gpu['use']:.0%} {gpu['memory_nbytes'] / 2**30:.1f} GiB",
    ]


def _as_shown(line: str) -> str:
    """Returns what a terminal shows of a line that was written over."""
    return line.rstrip("\r").rpartition("\r")[2]
