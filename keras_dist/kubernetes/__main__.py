"""The command of a pod: starts its ranks, and in the first pod the server of their world.

The pods learn about each other from the variables of torchrun, which Kubeflow Trainer sets:
`PET_NNODES`, `PET_NPROC_PER_NODE`, `PET_NODE_RANK`, `PET_MASTER_ADDR` and `PET_MASTER_PORT`.
"""

import argparse
import contextlib
import functools
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle

from keras_dist import errors
from keras_dist.launch.interactive.outcome import Failure
from keras_dist.launch.world import WorldServer
from keras_dist.launch.world.worker import run_rank, wait_for_cause

RETRY_SECONDS, CONNECT_SECONDS = 0.5, 10.0


def main() -> int:
    """Runs a script on the ranks of this pod; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m keras_dist.kubernetes", allow_abbrev=False)
    parser.add_argument("--token-file", type=Path, required=True, help="file with the secret")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds; default 300")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="Python script, with arguments")
    options = parser.parse_args()
    if not options.script:
        parser.error("a script is missing")
    nodes, ranks, node = map(_number, ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"))
    host, port = _variable("PET_MASTER_ADDR", "a host"), _number("PET_MASTER_PORT")
    token, timeout = _token(options.token_file), options.start_timeout
    world = {"address": f"{host}:{port}", "token": token, "size": nodes * ranks, "timeout": timeout}
    started = _forward_termination()
    with contextlib.ExitStack() as stack:
        server = None
        if node == 0:
            own = _retried(lambda: socket.gethostbyname(host), f"the name {host}", timeout)
            server = stack.enter_context(
                WorldServer(nodes * ranks, host=own, port=port, token=token, timeout=timeout)
            )
        reach = functools.partial(socket.create_connection, (host, port), CONNECT_SECONDS)
        _retried(reach, f"the first pod to answer at {host}:{port}", timeout).close()
        work = cloudpickle.dumps((_run_script, (options.script,), {}))
        start = functools.partial(run_rank, work, environment={})
        threads = stack.enter_context(ThreadPoolExecutor(ranks))
        worlds = [{**world, "rank": node * ranks + index} for index in range(ranks)]
        started.set()
        codes = [_exit_code(outcome) for outcome in threads.map(start, worlds)]
        if server is not None and any(codes):
            wait_for_cause(server)
        elif server is not None:
            server.wait()  # the ranks of other pods
    return _first_failure(codes)


def _run_script(words: list[str]) -> None:
    """Runs a script as Python does, with its arguments."""
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _exit_code(outcome: Any) -> int:
    """Returns the exit code of a rank: that of `sys.exit` in the script, or 1 after a failure."""
    if not isinstance(outcome, Failure):
        return 0
    error = outcome.error()
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    print(f"keras_dist: {outcome.text}", file=sys.stderr, flush=True)
    return 1


def _first_failure(codes: list[int]) -> int:
    """Returns the first exit code other than 0. The system keeps 8 bits, which may be zeros."""
    return next((code & 0xFF or 1 for code in codes if code), 0)


def _token(path: Path) -> str:
    try:
        token, received = path.read_text().strip(), f"{path}, which is empty"
    except (OSError, UnicodeDecodeError) as error:
        token, received = "", f"{path}: {error}"
    if token:
        return token
    raise errors.LaunchError(
        "[keras_dist.kubernetes]",
        "--token-file to be a text file with the secret of the job",
        received,
        "Mount a Secret that has this file into each pod.",
    )


def _number(name: str) -> int:
    return int(_variable(name, "a number", str.isdecimal))


def _variable(name: str, expected: str, accepts: Callable[[str], bool] = bool) -> str:
    text = os.environ.get(name, "")
    if not accepts(text):
        raise errors.LaunchError(
            "[keras_dist.kubernetes]",
            f"the environment variable {name} with {expected}",
            repr(text) if text else "none",
            "Set it in the pod, or numProcPerNode of the TrainJob.",
        )
    return text


def _retried(attempt: Callable[[], Any], expected: str, timeout: float) -> Any:
    """Returns the result of an attempt: the first pod may start later, and so may its name."""
    end = time.monotonic() + timeout
    while True:
        try:
            return attempt()
        except OSError as error:
            if time.monotonic() > end:
                raise errors.LaunchError(
                    "[keras_dist.kubernetes]",
                    f"{expected} within {timeout:g} s",
                    str(error),
                    "Look at the log of the first pod, and at the service of the job.",
                ) from error
            time.sleep(RETRY_SECONDS)


def _forward_termination() -> threading.Event:
    """Passes SIGTERM on to the ranks; the first process of a pod would ignore it."""
    started = threading.Event()
    with contextlib.suppress(OSError):  # it leads a session already
        os.setpgrp()

    def forward(number: int, frame: Any) -> None:
        if not started.is_set():
            raise SystemExit(128 + number)
        # This process is in the group as well. A rank that starts later would inherit SIG_IGN.
        signal.signal(number, lambda *ignored: None)
        os.killpg(os.getpgrp(), number)

    signal.signal(signal.SIGTERM, forward)
    return started


if __name__ == "__main__":
    try:
        sys.exit(main())
    except errors.KerasDistError as error:
        sys.exit(f"keras_dist: {error}")
