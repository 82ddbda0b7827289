"""`keras-dist top`: shows the running jobs of this user in a terminal."""

import argparse
import contextlib
import datetime
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keras_dist import errors
from keras_dist.monitor.report import Job
from keras_dist.monitor.server import Server
from keras_dist.monitor.sockets import find_sockets, jobs_of, remove_dead

NONE_FOUND = 1
REDRAWS_PER_SECOND = 2
PLAIN_WIDTH = 160  # characters, without a terminal

DESCRIPTION = """Shows the jobs of this user whose rank 0 is on this node: ranks, step, loss,
samples per second, the fraction of time in which ranks wait for others, memory, GPUs. The others
wait for the rank that waits least."""


def add_to(commands: Any, name: str) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(name, description=DESCRIPTION, allow_abbrev=False)
    parser.set_defaults(act=_top)
    parser.add_argument(
        "pid", nargs="?", type=int, help="process id of rank 0 of a job. Defaults to all jobs"
    )
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    outputs = parser.add_mutually_exclusive_group()
    outputs.add_argument("--json", action="store_true", help="print one line of JSON per job")
    outputs.add_argument("--web", action="store_true", help="serve a web page")
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port of the web page (any free port)"
    )
    parser.add_argument(
        "--address",
        type=_address,
        metavar="HOST:PORT",
        help="address of a job that listens on KERAS_DIST_TOP_PORT",
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with its token")


class _Watched:
    """Jobs, each read by a thread of its own until it ends."""

    def __init__(self, streams: Sequence[tuple[Job, Iterator[Job]]]):
        self._jobs = [job for job, _ in streams]
        self._threads = []
        for number, (_, stream) in enumerate(streams):
            thread = threading.Thread(target=self._read, args=(number, stream), daemon=True)
            thread.start()
            self._threads.append(thread)

    def jobs(self) -> list[Job]:
        """Returns the latest state of each job."""
        return list(self._jobs)

    def live(self) -> bool:
        """Returns whether a job is still running."""
        return any(thread.is_alive() for thread in self._threads)

    def _read(self, number: int, stream: Iterator[Job]) -> None:
        with contextlib.suppress(OSError, errors.ArgumentError):  # the job has ended
            for job in stream:
                self._jobs[number] = job


def _top(options: argparse.Namespace) -> int:
    found = list(_find(options))
    if not found:
        which = "No job of yours" if options.pid is None else f"No job with process {options.pid}"
        print(
            f"keras-dist top: {which} runs on {os.uname().nodename}. Jobs are visible on the node "
            "of rank 0, to the user who started them, unless KERAS_DIST_TOP=0 is set.",
            file=sys.stderr,
        )
        return NONE_FOUND
    jobs = [job for job, _ in found]
    is_shown_once = options.once or not (options.json or sys.stdout.isatty())
    if is_shown_once and not options.web:
        _show(jobs, options.json)
        return 0
    watched = _Watched(found)
    while options.json and not options.web and watched.live():
        _show(watched.jobs(), as_json=True)
        time.sleep(1)
    with contextlib.suppress(KeyboardInterrupt):
        if options.web:
            _serve(watched, options.port)
        elif not options.json:
            _draw_continuously(watched)
    return 0


def _find(options: argparse.Namespace) -> Iterator[tuple[Job, Iterator[Job]]]:
    """Yields the selected jobs, each with the stream of its states."""
    if options.address is not None:
        host, port = options.address
        stream = jobs_of((host, port), _token(options.token_file))
        try:
            yield next(stream), stream
        except (OSError, StopIteration) as error:
            raise errors.LaunchError(
                "[keras-dist top]",
                f"a job at {host}:{port}",
                str(error) or "no answer",
                "Start it with KERAS_DIST_TOP_PORT, and open the tunnel to the node of rank 0.",
            ) from None
        return
    remove_dead()
    for path in find_sockets():
        stream = jobs_of(path)
        try:
            job = next(stream)
        except ConnectionRefusedError:  # of another node, or of a container that has ended
            continue
        except (OSError, StopIteration, errors.ArgumentError) as error:
            print(f"keras-dist top: {path.name}: {error or 'ended'}", file=sys.stderr, flush=True)
            continue
        if options.pid in (None, job.pid):
            yield job, stream


def _token(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ArgumentError(
            "[keras-dist top]",
            "--token-file to be the token file in the directory of the job's socket",
            str(error),
            "Copy it from the node of rank 0.",
        ) from None


def _show(jobs: Sequence[Job], as_json: bool) -> None:
    if as_json:
        for job in jobs:
            print(job.to_json(), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for job in jobs:
        console.print(_table(job))


def _serve(watched: _Watched, port: int) -> None:
    """Serves the page on the loopback interface; its URL holds a token, for this user only."""
    token = secrets.token_urlsafe(32)
    try:
        server = Server(watched.jobs, ("127.0.0.1", port), token)
    except (OSError, OverflowError) as error:
        raise errors.LaunchError(
            "[keras-dist top]",
            "a free port for the page",
            f"{port}: {error}",
            "Choose another port, or omit --port for any free one.",
        ) from None
    url = f"http://127.0.0.1:{server.server_address[1]}/?token={token}"
    print(f"Watch at {url} (Ctrl-C ends this, not the job)", flush=True)
    with contextlib.closing(server):
        while watched.live():
            time.sleep(1)
    print("The job has ended.")


def _draw_continuously(watched: _Watched) -> None:
    def tables() -> Group:
        return Group(*map(_table, watched.jobs()))

    with Live(get_renderable=tables, refresh_per_second=REDRAWS_PER_SECOND):
        while watched.live():
            time.sleep(1 / REDRAWS_PER_SECOND)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an address and a port: {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _table(job: Job) -> Table:
    """Returns the table of a job, with a row for each rank."""
    has_gpu = any(report.gpu for report in job.rows)
    drawn = Table(
        title=Text(_title(job)),
        caption=Text(_summary(job)),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    heads = ["rank", "host", "state", "epoch", "step", "steps/s", "samples/s", "waiting", "memory"]
    heads += ["GPU", "GPU memory"] * has_gpu
    for head in heads:
        drawn.add_column(head, justify="left" if head in ("host", "state") else "right")
    for report in job.rows:
        cells, is_slowest = report.cells(), report.rank == job.slowest
        style = "red" if report.is_silent else "yellow" if is_slowest else None
        drawn.add_row(*(Text(cells[head]) for head in heads), style=style)
    return drawn


def _title(job: Job) -> str:
    ranks, nodes = len(job.rows), job.nodes
    duration = datetime.timedelta(seconds=int(job.time - job.started))
    return (
        f"{job.name}: {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}, "
        f"process {job.pid} on {job.host}, for {duration}"
    )


def _summary(job: Job) -> str:
    parts = [f"{name} {value:.4g}" for name, value in job.rows[0].logs.items()]
    if job.samples_per_second is not None:
        parts.append(f"{job.samples_per_second:,.0f} samples/s in total")
    if job.waiting is not None:
        parts.append(f"waiting {job.waiting:.0%}")
    if job.slowest is not None:
        parts.append(f"slowest: rank {job.slowest}")
    if job.note:
        parts.append(job.note)
    return ", ".join(parts)
