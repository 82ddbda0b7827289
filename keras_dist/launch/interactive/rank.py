"""A rank of `keras_dist.run`, which mpiexec starts: runs the function and writes its outcome."""

import contextlib
import linecache
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator

import cloudpickle

from keras_dist import runtime
from keras_dist.launch.interactive.outcome import JobFiles, as_failure, as_value
from keras_dist.monitor.report import of_this_process, of_this_rank
from keras_dist.runtime import launch_environment

REPORT_SECONDS = 0.5


def main(folder: str) -> None:
    """Runs the function of a call on this rank."""
    exchange, rank = JobFiles(pathlib.Path(folder)), launch_environment.announced_rank() or 0
    with printing_to(exchange.log(rank)):
        run_call(exchange, rank)


def run_call(exchange: JobFiles, rank: int) -> None:
    """Runs the function of a call, and writes its progress and its outcome."""
    try:
        environment, path, cells, work = exchange.call()
        os.environ.update(environment)
        linecache.cache.update(cells)
        sys.path += [entry for entry in path if entry not in sys.path]
        threading.Thread(
            target=_report_periodically,
            args=(exchange, rank),
            name="keras_dist report",
            daemon=True,
        ).start()
        function, args, kwargs = cloudpickle.loads(work)
        value = function(*args, **kwargs)
        _report(exchange, rank)
        exchange.put_outcome(rank, as_value(value, rank))
    except BaseException as error:
        exchange.put_outcome(rank, as_failure(error))
        raise


def _report_periodically(exchange: JobFiles, rank: int) -> None:
    while True:
        with contextlib.suppress(OSError):  # such as a full disk, for a while
            _report(exchange, rank)
        time.sleep(REPORT_SECONDS)


def _report(exchange: JobFiles, rank: int) -> None:
    report = of_this_rank() if runtime.is_initialized() else of_this_process(rank)
    exchange.put_report(rank, report)


@contextlib.contextmanager
def printing_to(path: pathlib.Path) -> Iterator[None]:
    """Redirects the output of this process to a file, from C code and child processes as well."""
    path.unlink(missing_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    _redirect(log, log)
    os.close(log)
    try:
        yield
    finally:
        _redirect(*kept)
        for descriptor in kept:
            os.close(descriptor)


def _redirect(out: int, error: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(error, 2)


if __name__ == "__main__":
    main(sys.argv[1])
