"""`keras-dist top`: shows the running jobs of this user in a terminal."""

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_dist import errors
from keras_dist.monitor.job import Job
from keras_dist.monitor.sockets import find_sockets, is_of_this_node, jobs_at, jobs_of, remove

NONE_FOUND = 1
REDRAWS_PER_SECOND = 2
PLAIN_WIDTH = 160  # characters, without a terminal

DESCRIPTION = """Shows the jobs of this user whose rank 0 is on this node: ranks, step, loss,
samples per second, the fraction of time in which ranks wait for others, memory, GPUs. The others
wait for the rank that waits least."""


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser("top", description=DESCRIPTION, allow_abbrev=False)
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
    if options.web:
        return _serve(_Watched(found), options.port)
    if options.json:
        return _print_json(found, options.once)
    if options.once or not sys.stdout.isatty():
        return _draw_once([job for job, _ in found])
    return _draw_continuously(_Watched(found))


def _find(options: argparse.Namespace) -> Iterator[tuple[Job, Iterator[Job]]]:
    """Yields the selected jobs, each with the stream of its states."""
    if options.address is not None:
        host, port = options.address
        stream = jobs_at(host, port, _token(options.token_file))
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
    for path in find_sockets():
        stream = jobs_of(path)
        try:
            job = next(stream)
        except ConnectionRefusedError:  # the root was killed, or the node is down
            if is_of_this_node(path):
                remove(path)
            continue
        except (OSError, StopIteration, errors.ArgumentError) as error:
            _print(f"{path.name}: {error or 'ended'}")
            continue
        if options.pid in (None, job.pid):
            yield job, stream


def _token(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text().strip()
    except OSError as error:
        raise errors.ArgumentError(
            "[keras-dist top]",
            "--token-file to be the token file in the directory of the job's socket",
            str(error),
            "Copy it from the node of rank 0.",
        ) from None


def _print_json(found: Sequence[tuple[Job, Iterator[Job]]], once: bool) -> int:
    if once:
        for job, _ in found:
            print(job.to_json())
        return 0
    watched = _Watched(found)
    while watched.live():
        for job in watched.jobs():
            print(job.to_json(), flush=True)
        time.sleep(1)
    return 0


def _serve(watched: _Watched, port: int) -> int:
    from keras_dist.monitor.web import Page  # imported only where it is needed

    with Page(watched.jobs, port) as page:
        print(f"Watch at {page.url} (Ctrl-C ends this, not the job)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while watched.live():
                time.sleep(1)
            print("The job has ended.")
    return 0


def _draw_once(jobs: Sequence[Job]) -> int:
    from keras_dist.launch.cli import (
        drawing,  # rich takes time to import
    )

    console = drawing.console(None if sys.stdout.isatty() else PLAIN_WIDTH)
    for job in jobs:
        console.print(drawing.table(job))
    return 0


def _draw_continuously(watched: _Watched) -> int:
    from keras_dist.launch.cli import (
        drawing,  # rich takes time to import
    )

    with (
        contextlib.suppress(KeyboardInterrupt),
        drawing.live(lambda: map(drawing.table, watched.jobs()), REDRAWS_PER_SECOND),
    ):
        while watched.live():
            time.sleep(1 / REDRAWS_PER_SECOND)
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an address and a port: {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _print(text: str) -> None:
    print(f"keras-dist top: {text}", file=sys.stderr, flush=True)
