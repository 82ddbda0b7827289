"""Which hosts there are at this moment: a script of the user's is asked at each start of a job."""

import argparse
import subprocess
import sys
import time

from keras_dist import errors
from keras_dist.cli.hosts import parse_hosts

__all__ = ["with_hosts"]

PAUSE_SECONDS = 1.0


def with_hosts(options: argparse.Namespace, again: bool) -> argparse.Namespace:
    """Returns options of `keras-dist run` with the hosts that the script names, if there is one.

    While there are fewer places than `--min-np` it is asked again, at most for
    `--elastic-timeout` seconds.

    Args:
        options: the options.
        again: whether the job has been started before; a script that fails then is asked again.

    Raises:
        ArgumentError: the script failed, said something else, or has named too few places.
    """
    script = options.host_discovery_script
    if script is None:
        return options
    end, least = time.monotonic() + options.elastic_timeout, options.min_np or options.np or 1
    while True:
        hosts, trouble = _ask(script)
        places = sum(hosts.values())
        if trouble is None and places >= least:
            ranks = min(places, options.max_np or options.np or places)
            named = ",".join(f"{name}:{slots}" for name, slots in hosts.items())
            return argparse.Namespace(**{**vars(options), "hosts": named, "np": ranks})
        if (trouble is not None and not again) or time.monotonic() > end:
            received = trouble or f"{places}, after {options.elastic_timeout} s"
            remedy = "It prints a host a line, such as h1:2, and ends with 0."
            expected = f"{script} to name {least} places for ranks or more"
            raise errors.ArgumentError(
                errors.explain("[keras-dist run]", expected, received, remedy)
            )
        time.sleep(PAUSE_SECONDS)


def _ask(script: str) -> tuple[dict[str, int], str | None]:
    """Returns the places for ranks by host, or why there is no answer."""
    ended = subprocess.run(
        ["/bin/sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    sys.stderr.flush()
    lines = [line.strip() for line in ended.stdout.splitlines() if line.strip()]
    if ended.returncode != 0:
        return {}, f"exit code {ended.returncode}"
    return (parse_hosts(",".join(lines)) if lines else {}), None
