"""What a process that `keras-dist run` has started does before it becomes the program.

It takes its share of the node's cores and has its output marked. Then the program takes its place,
so that mpiexec's child, its signals and its MPI are the program's own. Its output is read by a
process beside it, which ends with it. Knows no MPI.
"""

import argparse
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from keras_dist.runtime import launch_environment

__all__ = ["main"]

CHUNK_NBYTES = 65536
PATIENCE_SECONDS = 10.0  # with a line that does not end: a progress bar, or a program at work
NOT_FOUND = 127  # as shells end
WRONG_USAGE = 2  # as most programs end; such a job is not started anew
CLEAR_LINE = b"\r\x1b[K"


def main() -> None:
    """Runs a program as a rank; does not return."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_dist.launch.rank_wrapper", allow_abbrev=False
    )
    parser.add_argument("--bind", action="store_true", help="run on this rank's share of the cores")
    parser.add_argument("--live", action="store_true", help="the output ends in a terminal")
    parser.add_argument("--log-dir", type=Path, help="folder for a file with this rank's output")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    rank = launch_environment.announced_rank()
    _share_cores(options.bind)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # or prints would come at the end
    if rank is not None:
        try:
            log = None if options.log_dir is None else _open_log(options.log_dir, rank)
        except OSError as error:
            _give_up(f"--log-dir {options.log_dir}, for rank {rank}", error, WRONG_USAGE)
        if rank > 0 or not options.live or log is not None:
            _have_output_read(rank, options.live, log)
    launch_environment.forget_threads()
    try:
        os.execvp(options.program[0], options.program)
    except OSError as error:
        _give_up(options.program[0], error, NOT_FOUND)


def _give_up(what: str, error: OSError, code: int) -> NoReturn:
    text = f"keras-dist: {what} on {os.uname().nodename}: {error.strerror}"
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


def _share_cores(bind: bool) -> None:
    """Gives libraries that use OpenMP, numpy's among them, this rank's share of the cores."""
    size = launch_environment.announced_local_size()
    rank = launch_environment.announced_local_rank()
    if size < 2 or not hasattr(os, "sched_getaffinity"):
        return
    cores = _cores()
    if len(os.sched_getaffinity(0)) < len(os.sched_getaffinity(os.getppid())):
        share = len(cores)  # mpiexec has bound this rank
    else:
        share = len(cores) // size
        if bind and rank is not None and share:
            mine = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]
            os.sched_setaffinity(0, {cpu for core in mine for cpu in core})
            share = len(mine)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))


def _cores() -> list[frozenset[int]]:
    """Returns the cores this process may use, each with its hardware threads, by package."""
    allowed = os.sched_getaffinity(0)
    found: dict[tuple[int, ...], set[int]] = {}
    for cpu in sorted(allowed):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            place = [int((topology / f"{name}_id").read_text()) for name in PLACE]
        except (OSError, ValueError):
            place = [0, cpu]
        found.setdefault(tuple(place), set()).add(cpu)
    return [frozenset(found[place]) for place in sorted(found)]


PLACE = ("physical_package", "core")


def _open_log(folder: Path, rank: int) -> int:
    """Opens this rank's file, anew unless the job has been started anew."""
    folder.mkdir(parents=True, exist_ok=True)
    again = os.environ.get("KERAS_DIST_RESTART", "0") != "0"
    way = os.O_APPEND if again else os.O_TRUNC
    return os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | way, 0o666)


def _have_output_read(rank: int, live: bool, log: int | None) -> None:
    """Leads what this process prints from now on to a process that passes it on."""
    pipes = [os.pipe() for _ in range(2)]
    child = os.fork()
    if child == 0:
        try:
            # No child of the program, which may wait for its own, nor reached by what ends it: the
            # last lines are those that matter.
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                sources = [source for source, _ in pipes]
                _close_all_but({*sources, *([] if log is None else [log])})
                _pass_on(sources, rank, live, log)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for stream, (source, sink) in zip((1, 2), pipes, strict=True):
        os.dup2(sink, stream)
        os.close(sink)
        os.close(source)
    if log is not None:
        os.close(log)


def _close_all_but(kept: set[int]) -> None:
    """Closes what belongs to the program, such as its connection to mpiexec."""
    first = 3  # behind the standard streams
    for number in sorted(kept):
        if first < number:  # of an empty range Python would close everything
            os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _pass_on(sources: list[int], rank: int, live: bool, log: int | None) -> None:
    mark = b"" if rank == 0 else b"[%d] " % rank
    streams = {
        source: _Stream(out, mark, live, log) for source, out in zip(sources, (1, 2), strict=True)
    }
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(PATIENCE_SECONDS):
                chunk = os.read(key.fd, CHUNK_NBYTES)
                streams[key.fd].take(chunk)
                if not chunk:
                    selector.unregister(key.fd)
            for stream in streams.values():
                stream.show_what_is_old()


class _Stream:
    """What one rank prints to one place.

    The root's output in a terminal is passed on as it comes. All else is passed on in whole lines,
    so that those of several ranks do not mix; of a line that was written over by carriage returns
    comes what a terminal would show.
    """

    def __init__(self, out: int, mark: bytes, live: bool, log: int | None):
        self._out = out
        self._raw = live and not mark
        # In a terminal the root's progress bar may stand where the line is to come.
        self._mark, self._front = mark, CLEAR_LINE if live else b""
        self._log = log
        self._line, self._since = b"", 0.0

    def take(self, chunk: bytes) -> None:
        """Passes on what was read; nothing is the end."""
        if self._log is not None:
            _write(self._log, chunk)
        if self._raw:
            _write(self._out, chunk)
            return
        *whole, rest = (self._line + chunk).split(b"\n")
        if whole or not self._line:
            self._since = time.monotonic()
        self._line = rest if len(rest) < CHUNK_NBYTES else _shown(rest)
        self._show(whole)
        if self._line and (not chunk or len(self._line) >= CHUNK_NBYTES):
            self._show([self._line])
            self._line = b""

    def show_what_is_old(self) -> None:
        """Passes on a line that has not ended for a while."""
        if self._line and time.monotonic() - self._since > PATIENCE_SECONDS:
            self._show([self._line])
            self._line = b""

    def _show(self, lines: list[bytes]) -> None:
        shown = [_shown(line) for line in lines]
        # What keras_dist prints when a job ends carries the mark already.
        marked = [line if line.startswith(self._mark) else self._mark + line for line in shown]
        if marked:
            _write(self._out, b"".join(self._front + line + b"\n" for line in marked))


def _shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _write(out: int, data: bytes) -> None:
    """Writes all of it; where nobody reads any more the program goes on none the less."""
    try:
        while data:
            data = data[os.write(out, data) :]
    except OSError:
        pass


if __name__ == "__main__":
    main()
