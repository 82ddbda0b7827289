"""The wrapper that `keras-dist run` starts for each rank. Imports no MPI.

It binds the rank to its cores, redirects its output through a child process that marks every line,
and executes the program in its place: the child of mpiexec, with its own signals and MPI.
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
from keras_dist.runtime.exit_hooks import HOSTS_CHANGED

CHUNK_NBYTES = 65536
PATIENCE_SECONDS = 10.0  # for an incomplete line, such as a progress bar
NOT_FOUND = 127  # convention of shells
# Does not import from the current directory.
STAND_BY = (
    "import sys; del sys.path[: not sys.flags.safe_path]; "
    "from keras_dist.launch.standby_process import main; main()"
)
WRONG_USAGE = 2  # usage error; such a job is not restarted
CLEAR_LINE = b"\r\x1b[K"


def main() -> None:
    """Executes a program as a rank; does not return."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_dist.launch.rank_wrapper", allow_abbrev=False
    )
    parser.add_argument(
        "--bind", action="store_true", help="bind the rank to its share of the cores"
    )
    parser.add_argument("--live", action="store_true", help="the output ends in a terminal")
    parser.add_argument("--hosts-change", action="store_true", help="the launcher may say so")
    parser.add_argument("--log-dir", type=Path, help="directory for the output of the rank")
    parser.add_argument("--standby", type=int, help="words of Python before its script")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    rank = launch_environment.announced_rank()
    _split_cores(options.bind)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # unbuffered output
    held = ""
    if rank is not None:
        try:
            log = None if options.log_dir is None else _open_log(options.log_dir, rank)
        except OSError as error:
            _give_up(f"--log-dir {options.log_dir}, for rank {rank}", error, WRONG_USAGE)
        if rank > 0 or not options.live or log is not None:
            held = _redirect_output(rank, options.live, log, options.standby is not None)
    launch_environment.restore_threads()
    if options.hosts_change:
        signal.signal(HOSTS_CHANGED, signal.SIG_IGN)  # a program that does not listen goes on
    words = options.program
    if (count := options.standby) is not None:
        words = [*words[:count], "-c", STAND_BY, held, str(count), *words]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        _give_up(words[0], error, NOT_FOUND)


def _give_up(what: str, error: OSError, code: int) -> NoReturn:
    text = f"keras-dist: {what} on {os.uname().nodename}: {error.strerror}"
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


def _split_cores(bind: bool) -> None:
    """Sets the number of OpenMP threads to the cores of this rank."""
    size = launch_environment.announced_local_size()
    rank = launch_environment.announced_local_rank()
    if size < 2 or not hasattr(os, "sched_getaffinity"):
        return
    cores = cores_of_process()
    if len(os.sched_getaffinity(0)) < len(os.sched_getaffinity(os.getppid())):
        share = len(cores)  # mpiexec bound this rank
    else:
        share = len(cores) // size
        if bind and rank is not None and share:
            mine = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]
            os.sched_setaffinity(0, {cpu for core in mine for cpu in core})
            share = len(mine)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))


def cores_of_process() -> list[frozenset[int]]:
    """Returns the cores of this process by package, each with its hardware threads."""
    if not hasattr(os, "sched_getaffinity"):
        return [frozenset({cpu}) for cpu in range(os.cpu_count() or 1)]
    allowed = os.sched_getaffinity(0)
    found: dict[tuple[int, ...], set[int]] = {}
    for cpu in sorted(allowed):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            names = ("physical_package_id", "core_id")
            core = [int((topology / name).read_text()) for name in names]
        except (OSError, ValueError):
            core = [0, cpu]
        found.setdefault(tuple(core), set()).add(cpu)
    return [frozenset(found[core]) for core in sorted(found)]


def _open_log(folder: Path, rank: int) -> int:
    """Opens the output file of this rank; a restarted job appends to it."""
    folder.mkdir(parents=True, exist_ok=True)
    again = os.environ.get("KERAS_DIST_RESTART", "0") != "0"
    way = 0 if again else os.O_TRUNC
    way |= os.O_WRONLY | os.O_CREAT | os.O_APPEND  # a process that stands by may write as well
    return os.open(folder / f"rank-{rank}.log", way, 0o666)


def _redirect_output(rank: int, live: bool, log: int | None, holds: bool) -> str:
    """Redirects the output of this process to a child that forwards it."""
    pipes = [os.pipe() for _ in range(2)]
    gate, hand = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # Not a child of the program, which may wait for its own, and not killed with it: the
            # last lines matter most.
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                sources = [source for source, _ in pipes]
                _close_all_but({*sources, *([] if log is None else [log])})
                _pass_on(sources, rank, live, log)
            elif holds:
                _close_all_but({gate})
                os.closerange(0, 3)
                os.read(gate, 1)
        finally:
            os._exit(0)
    os.close(gate)
    for stream, (source, sink) in zip((1, 2), pipes, strict=True):
        os.dup2(sink, stream)
        os.close(sink)
        os.close(source)
    if log is not None:
        os.close(log)
    held = f"{hand}:{child}"
    if holds:
        os.set_inheritable(hand, True)
    else:
        let_go(held)
    return held


def let_go(held: str) -> None:
    """Makes the process that forwards the output an orphan, which gets another parent."""
    hand, child = map(int, held.split(":"))
    os.close(hand)
    os.waitpid(child, 0)


def _close_all_but(kept: set[int]) -> None:
    """Closes the file descriptors of the program, such as its connection to mpiexec."""
    first = 3  # after the standard streams
    for number in sorted(kept):
        if first < number:  # for an empty range Python would close everything
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
                stream.flush_stale_line()


class _Stream:
    """The output of one rank to one destination.

    The output of the root to a terminal is forwarded as it arrives. All other output is forwarded
    in whole lines, so that lines of ranks do not mix; a line with carriage returns is reduced to
    its visible part.
    """

    def __init__(self, out: int, mark: bytes, live: bool, log: int | None):
        self._out = out
        self._raw = live and not mark
        # The progress bar of the root may be on the current line of the terminal.
        self._mark, self._front = mark, CLEAR_LINE if live else b""
        self._log = log
        self._line, self._since = b"", 0.0

    def take(self, chunk: bytes) -> None:
        """Forwards bytes; none mean the end."""
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

    def flush_stale_line(self) -> None:
        """Forwards a line that has been incomplete for a while."""
        if self._line and time.monotonic() - self._since > PATIENCE_SECONDS:
            self._show([self._line])
            self._line = b""

    def _show(self, lines: list[bytes]) -> None:
        shown = [_shown(line) for line in lines]
        # Messages of keras_dist at the end of a job are marked already.
        marked = [line if line.startswith(self._mark) else self._mark + line for line in shown]
        if marked:
            _write(self._out, b"".join(self._front + line + b"\n" for line in marked))


def _shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _write(out: int, data: bytes) -> None:
    """Writes all bytes; the program continues if nobody reads."""
    try:
        while data:
            data = data[os.write(out, data) :]
    except OSError:
        pass


if __name__ == "__main__":
    main()
