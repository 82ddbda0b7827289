"""`keras-dist run`: starts a job, and restarts it after a failure."""

import argparse
import contextlib
import dataclasses
import math
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from keras_dist import config, errors
from keras_dist.launch.cli.command import check_entry, job_command, settings_of, ssh_of_job
from keras_dist.launch.cli.config_file import arguments_of_file
from keras_dist.launch.cli.connections import Connections, watched_connections
from keras_dist.launch.cli.discovery import with_hosts
from keras_dist.launch.cli.horovodrun import refuse
from keras_dist.launch.cli.hosts import allocation, parse_hosts
from keras_dist.launch.cli.job import Ended, run_job
from keras_dist.launch.cli.joiners import Joiners, slots_in_use
from keras_dist.launch.cli.mpiexec import Library, load_library
from keras_dist.launch.cli.options import OPTIONS, add_options
from keras_dist.launch.cli.program import add_program, program_of
from keras_dist.launch.cli.restart_signals import EndRequested, terminating_signals_raise
from keras_dist.runtime import exit_hooks
from keras_dist.runtime.job_directory import JobDirectory
from keras_dist.storage import memory_directory

TIMED_OUT = 124  # as timeout(1)
NEVER_AGAIN = (2, 128 + signal.SIGINT)  # usage error; Ctrl-C
MAX_PAUSE_SECONDS = 30
GOING_ON = ("continue", "replace")  # reactions to a death without a restart
RESTART, JOB_ID = "KERAS_DIST_RESTART", "KERAS_DIST_JOB_ID"
JOIN_DIRECTORY = "KERAS_DIST_JOIN_DIRECTORY"

DESCRIPTION = """Starts a program on several ranks with the mpiexec of the MPI library that mpi4py
loads, and forwards signals. With --max-restarts a failed job is restarted; a script that trains
with keras_dist.callbacks.BackupAndRestore resumes from its last backup."""


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        "run",
        description=DESCRIPTION,
        usage="keras-dist run [options] -np N "
        "(python train.py | train.py | notebook.ipynb | -m module) ...",
        allow_abbrev=False,
    )
    parser.set_defaults(act=lambda options: _run_in_time(_with_file(parser, options)))
    add_options(parser)
    refuse(parser)
    add_program(parser)


def _with_file(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Returns the options with those of the file, which the command line overrides."""
    if options.config_file is None:
        return options
    return parser.parse_args([*arguments_of_file(options.config_file), *options.words])


def _run_in_time(options: argparse.Namespace) -> int:
    seconds = math.inf if options.timeout is None else options.timeout
    try:
        return _run(options, time.monotonic() + seconds)
    except TimeoutError:
        _print("no hosts were found within the time limit (--timeout).")
        return TIMED_OUT


def _run(options: argparse.Namespace, end: float) -> int:
    program = program_of(options, "run -np 4")
    _check(options)
    library = load_library()
    added = {**settings_of(options), **_variables(options)}
    environment = {JOB_ID: secrets.token_hex(16), **os.environ, **added, RESTART: "0"}
    settings = config.parse(environment)
    ssh = ssh_of_job(options, environment)
    goes_on = options.on_failure in GOING_ON
    survives_rank_loss = goes_on and library.survives_rank_loss
    words = [*_launched(options), *program]
    binds = options.bind == "mpiexec"

    def start_of(restart: int) -> _Start:
        found = with_hosts(options, restart > 0, end)
        made = job_command(found, library, words, environment, survives_rank_loss, binds)
        # A host may come back between two restarts, so later starts try it.
        if not (restart or options.dry_run):
            check_entry(found, ssh)
        if not _starts_joiners(options) or library.is_open_mpi:
            return _Start(made)
        limit = options.max_np or options.np
        return _Start(made, _joiners(found, limit, library, program, environment).beside_the_job)

    start = start_of(0)
    command = start.command
    if options.dry_run or options.verbose:
        shown = [f"{name}={text}" for name, text in added.items()]
        print(shlex.join([*(["env", *shown] if shown else []), *command]), flush=True)
    if options.dry_run:
        return 0
    if goes_on and not library.survives_rank_loss:
        _print(_cannot_survive(library, options.max_restarts))
    if library.is_open_mpi and _starts_joiners(options):
        _print(
            f"{library.text} cannot connect processes to a running job: the discovery script "
            "runs at starts only."
        )
    if "--allow-run-as-root" in command:
        _print("running as root: --allow-run-as-root is passed to mpiexec.")
    try:
        limit = settings.stall_abort_seconds
        with terminating_signals_raise(), watched_connections(library, ssh, limit) as connections:
            environment |= connections.variables
            return _run_with_restarts(
                start, start_of, environment, options.max_restarts, end, connections
            )
    except EndRequested as request:
        _print(f"received {request.name} between two runs of the job.")
        return request.code
    finally:
        if JOB_ID not in {**os.environ, **added}:  # otherwise another launcher may restart the job
            memory_directory.remove_job(settings)


def _launched(options: argparse.Namespace) -> list[str]:
    """Returns the command of the rank wrapper, which marks output and assigns cores."""
    words = [sys.executable, "-P", "-m", "keras_dist.launch.rank_wrapper"]
    if options.bind == "cores" or (options.bind == "auto" and allocation(os.environ) is not None):
        words.append("--bind")
    if sys.stdout.isatty() and sys.stderr.isatty():
        words.append("--live")
    if options.log_dir is not None:
        words += ["--log-dir", os.path.abspath(options.log_dir)]
    return words


@dataclasses.dataclass(frozen=True)
class _Start:
    """A start of the job: its command line, and what runs beside it."""

    command: list[str]
    beside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def _joiners(
    found: argparse.Namespace,
    limit: int | None,
    library: Library,
    program: list[str],
    environment: Mapping[str, str],
) -> Joiners:
    """Returns what starts the processes that join while the job runs."""
    joining = {**environment, "KERAS_DIST_JOINS": "1"}

    def command_on(host: str) -> list[str]:
        on_host = argparse.Namespace(**{**vars(found), "hosts": host, "np": 1})
        return job_command(on_host, library, program, joining, binds=False)

    ranks = slots_in_use(parse_hosts(found.hosts), found.np)
    if found.np == 1:
        _print("a job that starts with one rank takes no further ranks while it runs.")
    script, directory = found.host_discovery_script, joining[JOIN_DIRECTORY]
    return Joiners(script, directory, ranks, limit, command_on, joining)


def _starts_joiners(options: argparse.Namespace) -> bool:
    """Returns whether processes join the job when the discovery script names further slots."""
    return options.host_discovery_script is not None and options.join_directory is not None


def _run_with_restarts(
    start: _Start,
    start_of: Callable[[int], _Start],
    environment: dict[str, str],
    max_restarts: int,
    end: float,
    connections: Connections,
) -> int:
    for restart in range(max_restarts + 1):
        environment[RESTART] = str(restart)
        if restart:
            start = start_of(restart)
        left = None if end == math.inf else max(0.01, end - time.monotonic())
        connections.begin()
        if directory := environment.get(JOIN_DIRECTORY):
            JobDirectory(directory).clear()
        ended = run_job(start.command, environment, left, None, connections.lost, start.beside)
        code = _exit_code(ended)
        if ended.signal is None and not ended.timed_out and (lost := connections.lost()):
            _print(lost)
        if ended.timed_out:
            _print("the job was ended after its time limit (--timeout).")
        if code == 0 or ended.signal is not None or code in NEVER_AGAIN:
            return code
        if code == exit_hooks.PREEMPTED_EXIT_CODE:
            _print(f"the job was preempted and saved its state (exit code {code}).")
            return code
        if restart < max_restarts:
            pause = min(2**restart, MAX_PAUSE_SECONDS)
            if time.monotonic() + pause >= end:
                _print(f"the job failed with exit code {code} at its time limit (--timeout).")
                return code
            _print(
                f"the job failed with exit code {code}. Restart {restart + 1} of {max_restarts} "
                f"in {pause} s."
            )
            time.sleep(pause)
    if max_restarts:
        _print(f"the job failed with exit code {code}, after {max_restarts} restarts.")
    return code


def _exit_code(ended: Ended) -> int:
    """Returns the exit code: that of the job, or of the signal that ended it."""
    if ended.timed_out:
        return TIMED_OUT
    if ended.code in (0, exit_hooks.PREEMPTED_EXIT_CODE):
        return ended.code
    return ended.code if ended.signal is None else 128 + ended.signal


def _check(options: argparse.Namespace) -> None:
    asks = options.host_discovery_script is not None
    if options.on_failure == "restart" and not options.max_restarts:
        expected, received = "the number of restarts", "--on-failure restart with --max-restarts 0"
        remedy = "Pass --max-restarts 3, for example."
    elif options.on_failure == "stop" and options.max_restarts:
        expected = "no restarts with --on-failure stop"
        received = f"--on-failure stop with --max-restarts {options.max_restarts}"
        remedy = "Leave one of them out."
    elif asks and (options.hosts or options.hostfile):
        expected, received = "only --host-discovery-script", "other options for hosts as well"
        remedy = "Leave out --hosts and --hostfile."
    elif (options.min_np or options.max_np) and not (asks or _ranks_change(options)):
        expected, received = "--min-np and --max-np with --host-discovery-script", "no such script"
        remedy = (
            "Pass -np N, or a script that prints one host per line, such as h1:2, or let ranks "
            "change with --join-directory or --on-failure."
        )
    elif options.max_np and options.max_np < (options.min_np or 1):
        expected, received = "--max-np of --min-np or more", f"{options.max_np}"
        remedy = f"--min-np is {options.min_np}."
    elif not asks and options.np and options.np < (options.min_np or 1):
        expected, received = "-np of --min-np or more", f"{options.np}"
        remedy = f"--min-np is {options.min_np}."
    elif not asks and options.np and options.np > (options.max_np or options.np):
        expected, received = "-np of --max-np or less", f"{options.np}"
        remedy = f"--max-np is {options.max_np}."
    else:
        return
    raise errors.ArgumentError("[keras-dist run]", expected, received, remedy)


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """Returns the environment variables that options set for the ranks."""
    values = {option.variable: getattr(options, option.field) for option in OPTIONS}
    wanted = {name: text for name, text in values.items() if name and text is not None}
    if options.on_failure in GOING_ON:
        wanted["KERAS_DIST_ON_FAILURE"] = options.on_failure
    if _ranks_change(options):
        limits = {"KERAS_DIST_MIN_NP": options.min_np, "KERAS_DIST_MAX_NP": options.max_np}
        wanted |= {name: str(limit) for name, limit in limits.items() if limit}
    if options.join_directory is not None:
        wanted[JOIN_DIRECTORY] = os.path.abspath(options.join_directory)
    return wanted


def _ranks_change(options: argparse.Namespace) -> bool:
    """Returns whether ranks may leave or join the job while it runs."""
    return options.join_directory is not None or options.on_failure in GOING_ON


def _cannot_survive(library: Library, max_restarts: int) -> str:
    instead = (
        f"the job is restarted instead, at most {max_restarts} times."
        if max_restarts
        else "the job ends instead; --max-restarts N would restart it."
    )
    return f"{library.text} cannot continue after the death of a rank: {instead}"


def _print(text: str) -> None:
    print(f"keras-dist: {text}", file=sys.stderr, flush=True)
