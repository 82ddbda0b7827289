"""Starts a measuring job and returns its result."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from keras_dist import errors
from keras_dist.launch.cli.command import check_entry, job_command, settings_of
from keras_dist.launch.cli.job import run_job
from keras_dist.launch.cli.mpiexec import load_library

__all__ = ["measure"]

MARK = "keras_dist measured: "
SECONDS = 300


def measure(options: argparse.Namespace, ranks: int, sizes: Iterable[int]) -> dict[str, Any]:
    """Runs `keras_dist.launch.microbench` on some ranks and returns its result.

    Args:
        options: hosts and number of ranks, parsed by `add_host_options`.
        ranks: number of ranks.
        sizes: sizes of the reductions in bytes.

    Raises:
        LaunchError: the job failed, or there is no mpiexec.
    """
    program = [sys.executable, "-P", "-m", "keras_dist.launch.microbench", MARK, *map(str, sizes)]
    environment = {**os.environ, **settings_of(options)}
    where = argparse.Namespace(**{**vars(options), "np": ranks})
    command = job_command(where, load_library(), program, environment, binds=False)
    check_entry(where, environment)
    with tempfile.TemporaryFile("w+") as output:
        ended = run_job(command, environment, SECONDS, output)
        output.seek(0)
        lines = output.read().splitlines()
    for line in lines:
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    told = " / ".join(line.strip() for line in lines if line.strip())[-2000:]
    raise errors.LaunchError(
        errors.explain(
            "[keras-dist]",
            f"a job of {ranks} ranks to finish",
            f"exit code {ended.code}" + (f" and {told}" if told else ""),
            "Try: keras-dist run -np 2 hostname",
        )
    )
