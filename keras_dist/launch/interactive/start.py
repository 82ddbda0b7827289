"""The caller of `keras_dist.run`: starts the ranks, waits for them, and ends them."""

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

from keras_dist import errors
from keras_dist.launch.cli.hosts import allocation
from keras_dist.launch.cli.job_process import end_with_parent
from keras_dist.launch.interactive.outcome import (
    SHOWN_LINES,
    JobFiles,
    pickled,
    raise_failure,
    value_of,
)
from keras_dist.launch.interactive.view import View, open_view
from keras_dist.runtime import launch_environment

WHERE = "[keras_dist.run]"
USAGE = 2  # exit code of keras-dist run without a job
TURN_SECONDS = 0.1
END_SECONDS = 6.0  # the launcher kills processes after 5


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
    """Runs a function on new ranks and returns its value on each rank.

    For notebooks and consoles. `keras-dist run` starts the ranks as processes of their own, which
    end and free their GPUs and memory before this function returns. The calling process is not a
    rank. cloudpickle transfers the function, the objects it refers to and its return values, so the
    function may be defined in a cell. It runs in a new Python process: call `keras_dist.init()`,
    build the model and read the data inside the function.

    The output of the root appears as it is printed, with a table of all ranks below it in a
    terminal and above it in a notebook. An interrupt ends the ranks.

    Args:
        fn: function to run.
        args: positional arguments, the same on every rank. Defaults to none.
        kwargs: keyword arguments, the same on every rank. Defaults to none.
        np: number of ranks. Defaults to 2.
        hosts: hosts and slots, such as `"node1:4,node2:4"`; the hosts must share the working
            directory. Defaults to this host, or the nodes of the batch job.
        env: environment variables for the ranks, besides those of this process. Defaults to none.
        timeout: seconds after which the ranks are ended. Defaults to `None`: never.
        verbose: whether to show output and table. Defaults to `True`.
        num_proc: Horovod's name for `np`. Defaults to `np`.

    Returns:
        List with the value of each rank, in the order of ranks.

    Raises:
        RankError: the function raised on a rank, the job ended without the value of a rank, or
            `timeout` passed. Its cause is the original exception if that can be pickled.
        ArgumentError: `np` is less than 1.
        ArgumentTypeError: `fn` is not callable, or it or its arguments cannot be pickled.
        LaunchError: this process is a rank itself, or the ranks could not be started.

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
    # Nodes usually share working directories, but not temporary directories.
    parent = None if hosts is None and not allocation(os.environ) else "."
    with tempfile.TemporaryDirectory(
        prefix=".keras_dist-",
        dir=parent,
        ignore_cleanup_errors=True,  # NFS keeps files that are open elsewhere
    ) as name:
        exchange = JobFiles(pathlib.Path(name).absolute())
        work = _pickled((fn, tuple(args), dict(kwargs or {})))
        path = [os.path.abspath(entry) for entry in sys.path]
        # Sources without a file, such as cells, for tracebacks of the ranks.
        sources = linecache.cache.items()
        cells = {file: entry for file, entry in sources if len(entry) == 4 and entry[1] is None}
        exchange.put_call((dict(env or {}), path, cells, work))
        log = exchange.folder / "launcher"
        with open_view(exchange, np, verbose) as view, log.open("xb") as output:
            code = _wait(lambda: _start(exchange, np, hosts, env or {}, output), view, timeout)
        return _values(exchange, np, code, log.read_text(errors="replace"))


def _start(
    exchange: JobFiles, np: int, hosts: str | None, env: Mapping[str, str], output: Any
) -> subprocess.Popen[bytes]:
    """Starts the ranks through a supervising process; signal handlers of this process stay."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **env}  # output is unbuffered
    if environment.get("MPLBACKEND", "").startswith("module://matplotlib_inline"):
        del environment["MPLBACKEND"]  # belongs to the notebook; ranks have none
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "keras_dist.launch.cli", "run", "-np", str(np)),
            *([] if hosts is None else ["-H", hosts]),
            *(sys.executable, "-m", "keras_dist.launch.interactive.rank", str(exchange.folder)),
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # this process forwards interrupts
        preexec_fn=end_with_parent,  # a kernel may restart
    )


def _wait(start: Callable[[], subprocess.Popen[bytes]], view: View, timeout: float | None) -> int:
    """Starts the job and shows its output until it ends or is interrupted."""
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
                        "ranks that were still running, and were ended",
                        "Pass a longer timeout, or check the progress in the table.",
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
    """Delays an interrupt, which would lose a process that is just starting."""
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


def _values(exchange: JobFiles, np: int, code: int, printed_by_launcher: str) -> list[Any]:
    """Returns the values of the ranks of a finished job, in the order of ranks."""
    outcomes = [exchange.outcome(rank) for rank in range(np)]
    raise_failure(outcomes, exchange.tail)
    missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if not missing and code == 0:
        return [value_of(outcome, rank, np) for rank, outcome in enumerate(outcomes)]
    started = any(exchange.log(rank).exists() for rank in range(np))
    if code == USAGE and not started:
        raise errors.LaunchError(printed_by_launcher.strip().removeprefix("keras-dist: "))
    logs = [f"rank {rank}:\n{tail}" for rank in missing if (tail := exchange.tail(rank))]
    text = errors.explain(
        WHERE,
        f"{np} ranks to run the function and to return",
        f"exit code {code}, and no value of {len(missing)} of them",
        "Last output:" if started else "Run keras-dist doctor, or start fewer ranks.",
    )
    kind = errors.RankError if started else errors.LaunchError
    raise kind("\n".join([text, *logs, "\n".join(printed_by_launcher.splitlines()[-SHOWN_LINES:])]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a running job: by SIGINT, after a while by a second one, then by SIGKILL."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(END_SECONDS)
    process.wait()


def _pickled(work: Any) -> bytes:
    try:
        return pickled(work)
    except Exception as error:  # pickling may raise anything
        raise errors.ArgumentTypeError(
            WHERE,
            "a function and arguments that can be pickled, with all objects that they refer to",
            f"{type(error).__name__}: {error}",
            "Open files, locks and devices within the function.",
        ) from error


def _check(fn: Any, np: Any) -> None:
    if not callable(fn):
        raise errors.ArgumentTypeError(WHERE, "a function", repr(fn), "Pass it without calling it.")
    if not isinstance(np, int) or np < 1:
        kind = errors.ArgumentError if isinstance(np, int) else errors.ArgumentTypeError
        raise kind(WHERE, "np to be 1 rank or more", repr(np), "Pass np=2.")
    announced = launch_environment.announced_size()
    # A batch job sets the variables of ranks for the script too, which is not a rank.
    if announced is not None and announced.size > 1 and announced.variable != "SLURM_NTASKS":
        raise errors.LaunchError(
            WHERE,
            "a process that is not a rank",
            f"one of {announced.size} ranks according to {announced.launcher} "
            f"({announced.variable})",
            "Call the function itself on every rank, or start this script by python alone.",
        )
