"""`keras-dist run`: starts a job, and starts it anew when it fails."""

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from typing import Any

from keras_dist import config, ending, errors
from keras_dist.cli.job import Ended, run_job
from keras_dist.cli.mpiexec import Library, find_mpiexec, load_library, mpiexec_options

__all__ = ["add_to"]

TIMED_OUT = 124  # as timeout(1) ends
NEVER_AGAIN = (2, 128 + signal.SIGINT)  # wrong usage, as of most programs; Ctrl-C
MAX_PAUSE_SECONDS = 30
RESTART = "KERAS_DIST_RESTART"
PASSED_ON = "KERAS_"  # the variables that ranks on other nodes need

DESCRIPTION = """Starts a program on many ranks, by the mpiexec of the MPI library that mpi4py
loads, and passes on signals. With --max-restarts a job that fails is started anew; a script that
trains with keras_dist.callbacks.BackupAndRestore goes on from its last checkpoint."""


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "run",
        help="start a job, and start it anew when it fails",
        description=DESCRIPTION,
        usage="keras-dist run [options] -np N (python train.py | train.py | -m module) ...",
        allow_abbrev=False,
    )
    parser.set_defaults(act=_run)
    parser.add_argument(
        "-np", "-n", dest="ranks", type=_number(1), required=True, metavar="N", help="ranks"
    )
    parser.add_argument(
        "--max-restarts",
        type=_number(0),
        default=0,
        metavar="N",
        help="how often a job that fails is started anew (0)",
    )
    parser.add_argument(
        "--on-failure",
        choices=("stop", "restart", "continue"),
        help="when a rank dies: stop; restart (what --max-restarts means); or continue: the others "
        "go on without it, with Open MPI 5 or newer",
    )
    parser.add_argument(
        "--stall-seconds", metavar="SECONDS", help="sets KERAS_DIST_STALL_SECONDS for the ranks"
    )
    parser.add_argument(
        "--stall-abort-seconds",
        metavar="SECONDS",
        help="sets KERAS_DIST_STALL_ABORT_SECONDS for the ranks",
    )
    parser.add_argument(
        "--timeout",
        type=_number(1),
        metavar="SECONDS",
        help=f"ends the job, all tries together, after so long; exit code {TIMED_OUT}",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command, start nothing")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _run(options: argparse.Namespace) -> int:
    program = _program(options)
    _check(options)
    library = load_library()
    added = _variables(options)
    environment = {**os.environ, **added, RESTART: "0"}
    config.parse(environment)
    passed = sorted(name for name in environment if name.startswith(PASSED_ON))
    goes_on = options.on_failure == "continue" and library.goes_on
    mpiexec = find_mpiexec(library)
    command = [mpiexec, *mpiexec_options(library, options.ranks, passed, goes_on), *program]
    if options.dry_run:
        settings = [f"{name}={text}" for name, text in added.items()]
        print(shlex.join([*(["env", *settings] if settings else []), *command]))
        return 0
    if options.on_failure == "continue" and not library.goes_on:
        _say(_cannot_go_on(library, options.max_restarts))
    if "--allow-run-as-root" in command:
        _say("running as root, so mpiexec is told --allow-run-as-root.")
    return _try_again_and_again(command, environment, options.max_restarts, options.timeout)


def _try_again_and_again(
    command: list[str], environment: dict[str, str], max_restarts: int, seconds: float | None
) -> int:
    end = None if seconds is None else time.monotonic() + seconds
    for restart in range(max_restarts + 1):
        environment[RESTART] = str(restart)
        left = None if end is None else max(0.01, end - time.monotonic())
        ended = run_job(command, environment, left)
        code = _exit_code(ended)
        if ended.timed_out:
            _say(f"the job has been ended, as {seconds} s are over (--timeout).")
        if code == 0 or ended.signal is not None or code in NEVER_AGAIN:
            return code
        if code == ending.PREEMPTED_EXIT_CODE:
            _say(f"the job was asked to end and has kept its state (exit code {code}).")
            return code
        if restart < max_restarts:
            pause = min(2**restart, MAX_PAUSE_SECONDS)
            if end is not None and time.monotonic() + pause >= end:
                _say(f"the job failed with exit code {code}. {seconds} s are over (--timeout).")
                return code
            _say(
                f"the job failed with exit code {code}. Restart {restart + 1} of {max_restarts} "
                f"in {pause} s."
            )
            time.sleep(pause)
    if max_restarts:
        _say(f"the job failed with exit code {code}, after {max_restarts} restarts.")
    return code


def _exit_code(ended: Ended) -> int:
    """Returns the launcher's exit code: that of the job, unless it was told to end."""
    if ended.code in (0, ending.PREEMPTED_EXIT_CODE):
        return ended.code
    if ended.timed_out:
        return TIMED_OUT
    return ended.code if ended.signal is None else 128 + ended.signal


def _program(options: argparse.Namespace) -> list[str]:
    """Returns the program and its arguments, as mpiexec is to start them."""
    if options.module is not None:
        words = [sys.executable, "-m", *options.module]
        missing = not options.module
    else:
        words = options.program[1:] if options.program[:1] == ["--"] else options.program
        missing = not words
        if words and words[0].endswith(".py"):
            words = [sys.executable, *words]
    if missing or shutil.which(words[0]) is None:
        raise errors.ArgumentError(
            errors.explain(
                "[keras-dist run]",
                "a program to start",
                repr(words[0]) if words and not missing else "none",
                "Name it behind the options, for example: "
                "keras-dist run -np 4 python train.py --epochs 3",
            )
        )
    return words


def _check(options: argparse.Namespace) -> None:
    received = f"--on-failure {options.on_failure} with --max-restarts {options.max_restarts}"
    if options.on_failure == "restart" and not options.max_restarts:
        expected, remedy = "the number of restarts", "Say --max-restarts 3, for example."
    elif options.on_failure == "stop" and options.max_restarts:
        expected, remedy = "no restarts where a failure stops the job", "Leave one of them out."
    else:
        return
    raise errors.ArgumentError(errors.explain("[keras-dist run]", expected, received, remedy))


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """Returns what the options put into the environment of the ranks."""
    wanted = {
        "KERAS_DIST_STALL_SECONDS": options.stall_seconds,
        "KERAS_DIST_STALL_ABORT_SECONDS": options.stall_abort_seconds,
        "KERAS_DIST_ON_FAILURE": "continue" if options.on_failure == "continue" else None,
    }
    return {name: text for name, text in wanted.items() if text is not None}


def _cannot_go_on(library: Library, max_restarts: int) -> str:
    instead = (
        f"the job is started anew instead, at most {max_restarts} times."
        if max_restarts
        else "the job ends instead; --max-restarts N would start it anew."
    )
    return f"{library.text} cannot go on without a rank that has died: {instead}"


def _number(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more: {text!r}")
        return int(text)

    return number


def _say(text: str) -> None:
    print(f"keras-dist: {text}", file=sys.stderr, flush=True)
