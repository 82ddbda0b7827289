"""`keras-dist run`: starts a job, and restarts it after a failure."""

import argparse
import contextlib
import importlib.util
import itertools
import math
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_dist import config, errors
from keras_dist.launch.cli import backends
from keras_dist.launch.cli.command import (
    add_program,
    check_entry,
    hosts_of_job,
    job_command,
    program_of,
    settings_of,
    ssh_of_job,
    words_of_python,
)
from keras_dist.launch.cli.discovery import HostWatch, tell, with_hosts
from keras_dist.launch.cli.hosts import allocation
from keras_dist.launch.cli.job_process import (
    Ended,
    EndRequested,
    run_job,
    terminating_signals_raise,
)
from keras_dist.launch.cli.mpiexec import load_library
from keras_dist.launch.cli.options import OPTIONS, add_options, arguments_of_file, refuse
from keras_dist.launch.cli.standby import Standby, standing_by
from keras_dist.launch.remote_shell import Connections, watched_connections
from keras_dist.runtime import exit_hooks
from keras_dist.storage import memory_directory

TIMED_OUT = 124  # as timeout(1)
UNCAUGHT = 1  # exit code of Python after an exception
NEVER_AGAIN = (2, 128 + signal.SIGINT)  # usage error; Ctrl-C
MAX_PAUSE_SECONDS = 30
RESTART, JOB_ID = "KERAS_DIST_RESTART", "KERAS_DIST_JOB_ID"
SERVER = "KERAS_DIST_STANDBY_SERVER"
STARTS_AGAIN = "KERAS_DIST_STARTS_AGAIN"

DESCRIPTION = """Starts a program on several ranks with the mpiexec of the MPI library that mpi4py
loads, and forwards signals. With --max-restarts a failed job is restarted; a script that trains
with keras_dist.callbacks.BackupAndRestore resumes from its last backup."""


def add_to(commands: Any, name: str) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        name,
        description=DESCRIPTION,
        usage="keras-dist run [options] -np N "
        "(python train.py | train.py | notebook.ipynb | -m module) ...",
        allow_abbrev=False,
    )
    parser.set_defaults(act=lambda options: _run_in_time(parser, options))
    add_options(parser)
    refuse(parser)
    add_program(parser)


def _run_in_time(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.config_file is not None:  # the command line overrides it
        options = parser.parse_args([*arguments_of_file(options.config_file), *options.words])
    seconds = math.inf if options.timeout is None else options.timeout
    try:
        return _run(options, time.monotonic() + seconds)
    except TimeoutError:
        tell("no hosts were found within the time limit (--timeout).")
        return TIMED_OUT


def _run(options: argparse.Namespace, end: float) -> int:
    program = program_of(options, "run -np 4")
    _check(options)
    library = load_library()
    added = {**settings_of(options), **_variables(options)}
    environment = {JOB_ID: secrets.token_hex(16), **os.environ, **added, RESTART: "0"}
    watch = HostWatch(options)
    if options.max_restarts or watch.is_active:
        environment[STARTS_AGAIN] = "1"
    settings = config.parse(environment)
    ssh = ssh_of_job(options, environment)
    goes_on = options.on_failure == "continue"
    survives_rank_loss = goes_on and library.survives_rank_loss
    words = [*_launched(options), *(["--hosts-change"] if watch.is_active else []), *program]
    binds = options.bind == "mpiexec"
    count = words_of_python(program) if options.max_restarts and settings.standby else 0
    if count:
        environment[SERVER] = ""  # mpiexec passes the variables that are set now

    def command_of(restart: int) -> list[str]:
        found = with_hosts(options, restart > 0, end)
        made = job_command(found, library, words, environment, survives_rank_loss, binds)
        # A host may come back between two restarts, so later starts try it.
        if not (restart or options.dry_run):
            check_entry(found, ssh)
        watch.begin(found)
        return made

    command = command_of(0)
    if options.dry_run or options.verbose:
        shown = [f"{name}={text}" for name, text in added.items()]
        print(shlex.join([*(["env", *shown] if shown else []), *command]), flush=True)
    if options.dry_run:
        return 0
    if goes_on and not library.survives_rank_loss:
        instead = "the job ends instead; --max-restarts N would restart it."
        if options.max_restarts:
            instead = f"the job is restarted instead, at most {options.max_restarts} times."
        tell(f"{library.text} cannot continue after the death of a rank: {instead}")
    if "--allow-run-as-root" in command:
        tell("running as root: --allow-run-as-root is passed to mpiexec.")
    try:
        limit = settings.stall_abort_seconds
        hosts = hosts_of_job(options, environment)
        ready = standing_by(environment, hosts, len(program), count)
        with (
            terminating_signals_raise(),
            watched_connections(library, ssh, limit) as connect,
            ready if count else contextlib.nullcontext() as standby,
        ):
            commands = itertools.chain([command], map(command_of, itertools.count(1)))
            code = _run_with_restarts(
                commands, environment, options.max_restarts, end, connect, watch, standby
            )
            if code == UNCAUGHT and words_of_python(program):
                _tell_of_backend(environment)
            return code
    except EndRequested as request:
        tell(f"received {request.name} between two runs of the job.")
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


def _run_with_restarts(
    commands: Iterator[list[str]],
    environment: dict[str, str],
    max_restarts: int,
    end: float,
    connect: Callable[[], Connections],
    watch: HostWatch,
    standby: Standby | None,
) -> int:
    failures = 0  # starts after a change of the hosts do not count
    in_vain = 0  # failures in a row without a step
    following = connect()
    for restart, command in enumerate(commands):
        environment[RESTART] = str(restart)
        left = None if end == math.inf else max(0.01, end - time.monotonic())
        process = None
        if standby is not None and restart:
            process = standby.take(command, environment)
        if process is None:  # what the ssh of processes that stood by notes is of the past
            following.close()
        connections = connect() if process is None else following
        environment |= connections.variables
        if standby is not None and failures < max_restarts:
            following = connect()
            told = {**environment, **following.variables, RESTART: str(restart + 1)}
            standby.prepare(command, told)
        ended = run_job(command, environment, left, None, connections.lost, watch.follow, process)
        code = _exit_code(ended)
        if ended.signal is None and not ended.timed_out and (found := connections.lost()):
            tell(found)
        connections.close()
        if ended.timed_out:
            tell("the job was ended after its time limit (--timeout).")
        if code == 0 or ended.signal is not None or code in NEVER_AGAIN:
            return code
        if code == exit_hooks.PREEMPTED_EXIT_CODE and watch.has_asked:
            continue
        if code == exit_hooks.PREEMPTED_EXIT_CODE:
            tell(f"the job was preempted and saved its state (exit code {code}).")
            return code
        if failures >= max_restarts:
            if max_restarts:
                tell(f"the job failed with exit code {code}, after {max_restarts} restarts.")
            return code
        progressed = standby is not None and standby.has_progressed
        in_vain = 0 if progressed else in_vain + 1
        pause = 0 if progressed else min(2 ** (in_vain - 1), MAX_PAUSE_SECONDS)
        if time.monotonic() + pause >= end:
            tell(f"the job failed with exit code {code} at its time limit (--timeout).")
            return code
        failures += 1
        tell(
            f"the job failed with exit code {code}. Restart {failures} of {max_restarts} "
            f"in {pause} s."
        )
        time.sleep(pause)
    raise AssertionError


def _tell_of_backend(environment: dict[str, str]) -> None:
    """Names the backend that Keras selects for the ranks, if it is not installed here."""
    wanted = backends.wanted(environment)
    if importlib.util.find_spec(wanted.partition(".")[0]) is None:
        tell(
            f"if the script failed at `import keras`: Keras selects the backend {wanted}, which is "
            f"not installed here. {backends.remedy(wanted)}"
        )


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
    elif asks and not options.host_discovery_script:
        expected, received = "a command in --host-discovery-script", "an empty text"
        remedy = "Pass a program that prints one host per line, such as h1:2."
    elif asks and (options.hosts or options.hostfile):
        expected, received = "only --host-discovery-script", "other options for hosts as well"
        remedy = "Leave out --hosts and --hostfile."
    elif (options.min_np or options.max_np) and not (
        asks or options.hostfile or options.on_failure == "continue"
    ):
        expected, received = "--min-np and --max-np with --host-discovery-script", "no such script"
        remedy = (
            "Pass -np N, or a script that prints one host per line, such as h1:2, or a "
            "--hostfile, or --on-failure continue."
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
    if options.on_failure == "continue":
        wanted["KERAS_DIST_ON_FAILURE"] = options.on_failure
        if options.min_np:
            wanted["KERAS_DIST_MIN_NP"] = str(options.min_np)
    return wanted
