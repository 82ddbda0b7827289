"""Host discovery: a script of the user names the available hosts at each start of a job."""

import argparse
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence

from keras_dist import errors
from keras_dist.launch.cli.hosts import parse_lines
from keras_dist.launch.cli.job import end_with_parent

PAUSE_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # granted to a script in any case


def with_hosts(options: argparse.Namespace, again: bool, end: float) -> argparse.Namespace:
    """Returns the options with the hosts that the discovery script names, if there is a script.

    The script runs again while there are fewer slots than `--min-np`, for at most
    `--elastic-timeout` seconds.
    """
    script = options.host_discovery_script
    if script is None:
        return options
    waits_until = time.monotonic() + options.elastic_timeout
    least = options.min_np or options.np or 1
    while True:
        answers_until = max(waits_until, time.monotonic() + ANSWER_SECONDS)
        hosts, trouble = ask(script, min(end, answers_until) - time.monotonic())
        slots = sum(hosts.values())
        if trouble is None and slots >= least:
            ranks = min(slots, options.max_np or options.np or slots)
            named = ",".join(f"{name}:{slots}" for name, slots in hosts.items())
            return argparse.Namespace(**{**vars(options), "hosts": named, "np": ranks})
        if time.monotonic() >= end:
            raise TimeoutError
        if (trouble is not None and not again) or time.monotonic() > waits_until:
            received = trouble or f"{slots}, after {options.elastic_timeout} s"
            remedy = "The script must print one host per line, such as h1:2, and exit with 0."
            expected = f"{shlex.join(script)} to name {least} or more slots"
            raise errors.ArgumentError("[keras-dist run]", expected, received, remedy)
        time.sleep(max(0.0, min(PAUSE_SECONDS, end - time.monotonic())))


def ask(script: Sequence[str], seconds: float) -> tuple[dict[str, int], str | None]:
    """Runs a discovery script; returns slots by host, and an error text or `None`.

    Args:
        seconds: time limit.
    """
    try:
        output, code = _output(script, seconds)
    except subprocess.TimeoutExpired:
        return {}, f"nothing within {seconds:.0f} s"
    except OSError as error:
        return {}, f"{error.strerror}: not an executable program"
    if code != 0:
        return {}, f"exit code {code}"
    hosts, wrong = parse_lines(output)
    return hosts, None if wrong is None else repr(wrong)


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
