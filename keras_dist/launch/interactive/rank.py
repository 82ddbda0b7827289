"""A rank of `keras_dist.run`: runs the function and writes its outcome.

mpiexec starts it as `python -m keras_dist.launch.interactive.rank FOLDER`.
"""

import linecache
import os
import pathlib
import sys
import threading
import time
import traceback
from typing import Any

import cloudpickle

from keras_dist import errors
from keras_dist.launch.interactive.exchange import Failure, JobFiles, Value
from keras_dist.launch.rank_log import printing_to
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
        _report(exchange, rank)
        time.sleep(REPORT_SECONDS)


def _report(exchange: JobFiles, rank: int) -> None:
    from keras_dist import runtime
    from keras_dist.monitor.report import of_this_process, of_this_rank

    report = of_this_rank() if runtime.is_initialized() else of_this_process(rank)
    exchange.put_report(rank, report.to_json())


def as_value(value: Any, rank: int) -> Value:
    """Returns a value as the outcome of a rank. Raises `ArgumentTypeError` if it has no pickle."""
    kind = type(value).__qualname__
    try:
        return Value(kind, cloudpickle.dumps(value))
    except Exception as error:  # pickling may raise anything
        raise errors.ArgumentTypeError(
            f"[rank {rank}]",
            "a return value that can be pickled",
            f"an object of type {kind} ({type(error).__name__}: {error})",
            "Return numbers or arrays, for example, and keep the object within the function.",
        ) from None


def is_consequence(error: BaseException) -> bool:
    """Returns whether an exception follows from the end of another rank."""
    kind = errors.RankLostError
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        text = "".join(traceback.format_exception_only(following))
        if f"{kind.__module__}.{kind.__name__}" in text:
            return True
        seen.append(following)
        following = following.__cause__ or following.__context__
    return False


def as_failure(error: BaseException) -> Failure:
    """Returns an exception as the outcome of a rank."""
    # The first frame belongs to this file.
    frames = error.__traceback__ and error.__traceback__.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:  # arguments of exceptions may be anything
        pickled = b""
    text = "".join(traceback.format_exception_only(error)).strip()
    return Failure(text, "".join(lines), pickled, is_consequence(error))


if __name__ == "__main__":
    main(sys.argv[1])
