"""The display of the caller while ranks run: output of the root, and a table of all ranks."""

import codecs
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from keras_dist.launch.interactive.outcome import JobFiles

TABLE_SECONDS = 0.5
# A column without values is omitted.
COLUMNS = ("host", "pid", "state", "step", "samples/s", "memory", "GPU", "GPU memory")


class View:
    """Shows the output of the root; nothing if it is not verbose."""

    def __init__(self, exchange: JobFiles, np: int, verbose: bool = True):
        self._exchange, self._np, self._verbose = exchange, np, verbose
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read = 0
        self._next_table = 0.0

    def show(self, last: bool = False) -> None:
        """Shows new output."""
        if not self._verbose:
            return
        with contextlib.suppress(FileNotFoundError), self._exchange.log(0).open("rb") as log:
            log.seek(self._read)
            new = log.read()
            self._read += len(new)
            if new:
                self.write(self._decoder.decode(new))
        if last or time.monotonic() >= self._next_table:
            self._next_table = time.monotonic() + TABLE_SECONDS
            self.tabulate()

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def tabulate(self) -> None:
        """Shows the table, if the output supports it."""

    def table(self) -> Any:
        """Returns the table of ranks for rich."""
        from rich.table import Table

        rows = [self._exchange.report(rank).cells() for rank in range(self._np)]
        table = Table(box=None, header_style="dim", pad_edge=False)
        table.add_column("rank", justify="right")
        filled = [name for name in COLUMNS if any(row[name] for row in rows)]
        for name in filled:
            table.add_column(name)
        for row in rows:
            table.add_row(row["rank"], *(row[name] for name in filled))
        return table


class _InNotebook(View):
    """The table is above the text and is updated in place."""

    def __init__(self, exchange: JobFiles, np: int):
        super().__init__(exchange, np)
        self._handle: Any = None

    def tabulate(self) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(self.table(), display_id=True)
        else:
            self._handle.update(self.table())


class _InTerminal(View):
    """The table is below the text, after the current line."""

    def __init__(self, exchange: JobFiles, np: int, live: Any):
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
def open_view(exchange: JobFiles, np: int, verbose: bool) -> Iterator[View]:
    """Opens the view that suits the output of this process."""
    if not verbose:
        yield View(exchange, np, verbose=False)
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


def _as_shown(line: str) -> str:
    """Returns the visible part of a line with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]
