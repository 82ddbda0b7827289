"""`keras_dist.run`: a function on many ranks, from a process that is none."""

import contextlib
import linecache
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import cloudpickle

from keras_dist import errors
from keras_dist.launch.cli.hosts import allocation
from keras_dist.launch.cli.job import end_with_parent
from keras_dist.launch.interactive.exchange import Exchange
from keras_dist.launch.interactive.outcome import WHERE, values
from keras_dist.launch.interactive.view import View, open_view
from keras_dist.runtime import launch_environment

__all__ = ["run"]

TURN_SECONDS = 0.1
END_SECONDS = 6.0  # after a request to end; the launcher takes 5 to kill what does not


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    *,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    verbose: bool = True,
    num_proc: int | None = None,
) -> list[Any]:
    """Runs a function on new ranks and returns what it returns on each.

    For notebooks and consoles: the ranks are processes of their own, started by `keras-dist run`,
    and are gone when this returns, with what they held of GPUs and memory. The calling process is
    no rank. The function, whatever it refers to and what it returns travel by cloudpickle, so it
    may be defined in a cell. It runs in a fresh Python: it is the place to call
    `keras_dist.init()`, to build the model and to read the data.

    What the root prints is shown as it comes, with a table of all ranks below it in a terminal and
    above it in a notebook. An interrupt ends the ranks.

    Args:
        fn: the function.
        args: what it is called with, on every rank alike. Defaults to nothing.
        kwargs: the same by name. Defaults to nothing.
        np: the number of ranks. Defaults to 2.
        hosts: where they run, such as `"node1:4,node2:4"`; the working directory must then be one
            that all of them share. Defaults to this machine, or the nodes of the batch job.
        env: variables for the ranks, besides those of this process. Defaults to none.
        timeout: seconds after which the ranks are ended. Defaults to `None`, never.
        verbose: whether output and table are shown. Defaults to `True`.
        num_proc: Horovod's name for `np`. Defaults to `np`.

    Returns:
        List of values, one for each rank, in their order.

    Raises:
        RankError: the function raised on a rank, or the job ended without a value of each, or it
            took too long. Its cause is the exception itself, where that can be pickled.
        ArgumentError: `np` is less than 1.
        ArgumentTypeError: `fn` cannot be called, or it or its arguments cannot be pickled.
        LaunchError: this process is itself a rank, or the ranks could not be started.

    Example:
    ```python
    def train(epochs):
        import keras_dist
        keras_dist.init()
        ...
        return model.fit(data, epochs=epochs, callbacks=keras_dist.callbacks()).history

    histories = keras_dist.run(train, kwargs={"epochs": 3}, np=4)
    ```
    """
    np = np if num_proc is None else num_proc
    _check(fn, np)
    # Nodes share the directories that people work in, seldom that of temporary files.
    place = None if hosts is None and not allocation(os.environ) else "."
    with tempfile.TemporaryDirectory(
        prefix=".keras_dist-",
        dir=place,
        ignore_cleanup_errors=True,  # a file that is open elsewhere lives on under NFS
    ) as name:
        exchange = Exchange(pathlib.Path(name).absolute())
        work = _pickled((fn, tuple(args), dict(kwargs or {})))
        path = [os.path.abspath(entry) for entry in sys.path]
        exchange.put_call((dict(env or {}), path, _cells(), work))
        log = exchange.folder / "launcher"
        with open_view(exchange, np, verbose) as view, log.open("xb") as said:
            code = _wait(lambda: _start(exchange, np, hosts, env or {}, said), view, timeout)
        return values(exchange, np, code, log.read_text(errors="replace"))


def _start(
    exchange: Exchange, np: int, hosts: str | None, env: Mapping[str, str], said: Any
) -> subprocess.Popen[bytes]:
    """Starts the ranks by a process that looks after them; signals of this one stay as they are."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **env}  # output comes as it is made
    if environment.get("MPLBACKEND", "").startswith("module://matplotlib_inline"):
        del environment["MPLBACKEND"]  # of this notebook, which ranks have none of
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "keras_dist.launch.cli", "run", "-np", str(np)),
            *([] if hosts is None else ["-H", hosts]),
            *(sys.executable, "-m", "keras_dist.launch.interactive.rank", str(exchange.folder)),
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        start_new_session=True,  # an interrupt comes by way of this process alone
        preexec_fn=end_with_parent,  # a kernel may be started anew
    )


def _wait(start: Callable[[], subprocess.Popen[bytes]], view: View, timeout: float | None) -> int:
    """Starts it, and shows what goes on to the end, which an interrupt brings about."""
    end = None if timeout is None else time.monotonic() + timeout
    process = None
    try:
        with _interrupt_afterwards():
            process = start()
        while process.poll() is None:
            view.show()
            if end is not None and time.monotonic() > end:
                raise errors.RankError(
                    errors.explain(
                        WHERE,
                        f"the function to return within {timeout} s",
                        "ranks that were still at work and have been ended",
                        "Pass a longer timeout, or find out where they stand from the table.",
                    )
                )
            time.sleep(TURN_SECONDS)
        return process.returncode
    finally:
        if process is not None:
            _end(process)
        view.show(last=True)


@contextlib.contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """Keeps an interrupt back: where a process is started it is lost, or the process is."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *told: came.append(told))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    for told in came[:1]:
        handler(*told)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a job that still runs: as Ctrl-C would, twice where that takes long, then by force."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(END_SECONDS)
    process.wait()


def _cells() -> dict[str, Any]:
    """Returns the sources that are in no file, such as cells, for tracebacks of the ranks."""
    entries = linecache.cache.items()
    return {name: entry for name, entry in entries if len(entry) == 4 and entry[1] is None}


def _pickled(work: Any) -> bytes:
    try:
        return cloudpickle.dumps(work)
    except Exception as error:  # objects raise what they like
        raise errors.ArgumentTypeError(
            errors.explain(
                WHERE,
                "a function and arguments that can be pickled, with all that they refer to",
                f"{type(error).__name__}: {error}",
                "Open files, locks and devices within the function.",
            )
        ) from error


def _check(fn: Any, np: Any) -> None:
    if not callable(fn):
        raise errors.ArgumentTypeError(
            errors.explain(WHERE, "a function", repr(fn), "Pass it without calling it.")
        )
    if not isinstance(np, int) or np < 1:
        kind = errors.ArgumentError if isinstance(np, int) else errors.ArgumentTypeError
        raise kind(errors.explain(WHERE, "np to be 1 rank or more", repr(np), "Pass np=2."))
    announced = launch_environment.announced_size()
    # A batch job announces its ranks to the script too, which is none of them.
    if announced is not None and announced.size > 1 and announced.variable != "SLURM_NTASKS":
        raise errors.LaunchError(
            errors.explain(
                WHERE,
                "to be called from a process that is no rank",
                f"one of {announced.size} ranks, as {announced.launcher} says "
                f"({announced.variable})",
                "Call the function itself on every rank, or start this script by python alone.",
            )
        )
