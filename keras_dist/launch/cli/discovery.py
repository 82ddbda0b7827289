"""Host discovery: a script of the user, or a hostfile, names the hosts, also while a job runs."""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_dist import errors
from keras_dist.launch.cli.hosts import parse_hosts, parse_lines
from keras_dist.launch.cli.job_process import end_with_parent
from keras_dist.launch.cli.mpiexec import listed
from keras_dist.runtime.exit_hooks import HOSTS_CHANGED

PAUSE_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # granted to a script in any case
FIRST_SECONDS = 5.0  # after the start of a job, until it is asked for: the ranks start
REPEAT_SECONDS = 5.0  # between requests: outside of training a job does not hear them

Hosts = Mapping[str, int]


def _source_of(options: argparse.Namespace) -> str:
    """Returns the script or file that names the hosts at each start; empty if there is none."""
    if (script := options.host_discovery_script) is not None:
        return shlex.join(script)
    return ((options.min_np or options.max_np) and options.hostfile) or ""


def _find(options: argparse.Namespace, seconds: float) -> Hosts:
    """Returns the hosts that the source names. Raises `ValueError` if it names none."""
    if (script := options.host_discovery_script) is not None:
        return ask(script, seconds)
    try:
        return parse_lines(Path(options.hostfile).read_text())
    except OSError as error:
        raise ValueError(str(error)) from None


def with_hosts(options: argparse.Namespace, again: bool, end: float) -> argparse.Namespace:
    """Returns the options with the hosts that the source names, if there is one."""
    if not (name := _source_of(options)):
        return options
    waits_until = time.monotonic() + options.elastic_timeout
    least = _least(options)
    # Asked again while there are fewer slots than `--min-np`, for `--elastic-timeout` seconds.
    while True:
        answers_until = max(waits_until, time.monotonic() + ANSWER_SECONDS)
        trouble = ""
        try:
            hosts = _find(options, min(end, answers_until) - time.monotonic())
            slots = sum(hosts.values())
            if slots >= least:
                found = {"hosts": listed(hosts), "hostfile": None, "np": _ranks(options, slots)}
                return argparse.Namespace(**{**vars(options), **found})
        except ValueError as error:
            trouble = str(error)
        if time.monotonic() >= end:
            raise TimeoutError
        if (trouble and not again) or time.monotonic() > waits_until:
            received = trouble or f"{slots}, after {options.elastic_timeout} s"
            remedy = "The script must print one host per line, such as h1:2, and exit with 0."
            if options.host_discovery_script is None:
                remedy = "The file must have one host per line, such as h1:2."
            expected = f"{name} to name {least} or more slots"
            raise errors.ArgumentError("[keras-dist run]", expected, received, remedy)
        time.sleep(max(0.0, min(PAUSE_SECONDS, end - time.monotonic())))


class HostWatch:
    """Asks for hosts while a job runs, and asks the job to stop when it should use others.

    That is a signal which this process passes on to the ranks: they save their state after the same
    step, and end. Ranks that cannot save anything ignore it, and are asked again.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        #: whether the job may have to start again on other hosts
        self.is_active = bool(_source_of(options) and (options.min_np or options.max_np))
        self._used: Hosts = {}
        self.has_asked = False

    def begin(self, started: argparse.Namespace) -> None:
        """Notes the hosts of a job that starts."""
        self.has_asked = False
        if self.is_active:
            self._used = slots_in_use(parse_hosts(started.hosts), started.np)

    def follow(self, has_ended: threading.Event) -> None:
        """Asks while a job runs, in a thread beside it."""
        told, before, asked_at = "", None, -REPEAT_SECONDS
        if not self.is_active or has_ended.wait(FIRST_SECONDS):
            return
        while not has_ended.wait(PAUSE_SECONDS):
            try:
                hosts = _find(self._options, ANSWER_SECONDS)
            except ValueError as error:
                if str(error) != told:
                    name, told = _source_of(self._options), str(error)
                    tell(f"{name} names no hosts while the job runs: {error}.")
                continue
            told = ""
            if has_ended.is_set():
                return
            # A host that comes and goes at once is no reason to stop.
            is_stable, before = hosts == before, hosts
            if is_stable and self._wants(hosts) and time.monotonic() > asked_at + REPEAT_SECONDS:
                self._ask(hosts)
                asked_at = time.monotonic()

    def _wants(self, hosts: Hosts) -> bool:
        """Returns whether the job should start again on these hosts."""
        slots = sum(hosts.values())
        if slots < _least(self._options):
            return False
        is_lost = any(hosts.get(name, 0) < count for name, count in self._used.items())
        return is_lost or _ranks(self._options, slots) > sum(self._used.values())

    def _ask(self, hosts: Hosts) -> None:
        if not self.has_asked:
            ranks = _ranks(self._options, sum(hosts.values()))
            tell(
                f"the hosts are {listed(hosts)} now. The job is asked to save its state and to "
                f"stop, and starts again with {ranks} ranks."
            )
        self.has_asked = True
        os.kill(os.getpid(), HOSTS_CHANGED)


def slots_in_use(hosts: Hosts, ranks: int) -> dict[str, int]:
    """Returns the number of ranks on each host, where hosts are filled in turn."""
    used = {}
    for name, slots in hosts.items():
        used[name] = min(slots, ranks)
        ranks -= used[name]
    return used


def _least(options: argparse.Namespace) -> int:
    return options.min_np or options.np or 1


def _ranks(options: argparse.Namespace, slots: int) -> int:
    return min(slots, options.max_np or options.np or slots)


def tell(text: str) -> None:
    """Prints a line of the launcher; the job goes on if nobody reads it."""
    with contextlib.suppress(OSError):
        print(f"keras-dist: {text}", file=sys.stderr, flush=True)


def ask(script: Sequence[str], seconds: float) -> Hosts:
    """Runs a discovery script for some seconds. Raises `ValueError` if it names no hosts."""
    try:
        output, code = _output(script, seconds)
    except subprocess.TimeoutExpired:
        raise ValueError(f"nothing within {seconds:.0f} s") from None
    except OSError as error:
        raise ValueError(f"{error.strerror}: not an executable program") from None
    if code != 0:
        raise ValueError(f"exit code {code}")
    return parse_lines(output)


def _output(script: Sequence[str], seconds: float) -> tuple[str, int]:
    """Returns the output and exit code of a program; no process of it is left."""
    with subprocess.Popen(
        script,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",  # invalid text names no host
        start_new_session=True,
        preexec_fn=end_with_parent,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:  # also for an interrupt
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return output, process.returncode
