"""Tables of jobs in the terminal, by rich: a row for each rank, drawn once or live."""

from collections.abc import Callable, Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keras_dist.monitor.job import Job, Row

SILENT_SECONDS = 5.0  # a rank with an older report does not answer


def console(width: int | None) -> Console:
    """Returns a console of a width in characters; `None` is the width of the terminal."""
    return Console(width=width)


def live(tables: Callable[[], Iterable[Table]], per_second: float) -> Live:
    """Returns a context manager that redraws tables in place."""
    return Live(get_renderable=lambda: Group(*tables()), refresh_per_second=per_second)


def table(job: Job) -> Table:
    """Returns the table of a job, with a row for each rank."""
    has_gpu = any(row.report.gpu for row in job.rows)
    drawn = Table(
        title=Text(_title(job)),
        caption=Text(_summary(job)),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    heads = ["rank", "host", "state", "epoch", "step", "steps/s", "samples/s", "waiting", "memory"]
    for head in heads + ["GPU", "GPU memory"] * has_gpu:
        drawn.add_column(head, justify="left" if head in ("host", "state") else "right")
    for row in job.rows:
        cells = _cells(row, has_gpu)
        silent = row.age is None or row.age > SILENT_SECONDS
        style = "red" if silent else "yellow" if row.report.rank == job.slowest else None
        drawn.add_row(*map(Text, cells), style=style)
    return drawn


def _title(job: Job) -> str:
    ranks, nodes = len(job.rows), job.nodes
    return (
        f"{job.name}: {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}, "
        f"process {job.pid} on {job.host}, for {_duration(job.time - job.started)}"
    )


def _summary(job: Job) -> str:
    parts = [f"{name} {value:.4g}" for name, value in job.rows[0].report.logs.items()]
    if job.samples_per_second is not None:
        parts.append(f"{job.samples_per_second:,.0f} samples/s in total")
    if job.waiting is not None:
        parts.append(f"waiting {job.waiting:.0%}")
    if job.slowest is not None:
        parts.append(f"slowest: rank {job.slowest}")
    if job.note:
        parts.append(job.note)
    return ", ".join(parts)


def _cells(row: Row, has_gpu: bool) -> list[str]:
    report = row.report
    state = (report.waits_in and f"waits in {report.waits_in}") or report.state
    if row.age is None:
        state = "has not answered"
    elif row.age > SILENT_SECONDS:
        state = f"no answer for {row.age:.0f} s"
    cells = [
        str(report.rank),
        report.host,
        state,
        _of(report.epoch, report.epochs),
        _of(report.step, report.steps),
        _number(report.steps_per_second),
        _number(report.samples_per_second),
        "" if report.waiting is None else f"{report.waiting:.0%}",
        _bytes(report.memory_nbytes),
    ]
    if has_gpu:
        gpu = report.gpu
        use = "" if gpu is None or gpu.use is None else f" {gpu.use:.0%}"
        cells += [f"{gpu.place}{use}", _bytes(gpu.memory_nbytes)] if gpu else ["", ""]
    return cells


def _of(number: int | None, total: int | None) -> str:
    if number is None:
        return ""
    return str(number) if total is None else f"{number}/{total}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
