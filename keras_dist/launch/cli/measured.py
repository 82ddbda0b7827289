"""Starts a measuring job and returns its result."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from keras_dist import errors
from keras_dist.launch.cli.command import check_entry, job_command, settings_of, ssh_of_job
from keras_dist.launch.cli.job import run_job
from keras_dist.launch.cli.mpiexec import load_library

MARK = "keras_dist measured: "
SECONDS = 300


def measure(options: argparse.Namespace, ranks: int, sizes: Iterable[int]) -> dict[str, Any]:
    """Runs `keras_dist.launch.microbench` on some ranks and returns the JSON that it prints.

    Args:
        sizes: sizes of the reductions in bytes.
    """
    module = "keras_dist.launch.microbench"
    program = [sys.executable, "-P", "-m", module, MARK, *map(str, sizes)]
    environment = {**os.environ, **settings_of(options)}
    where = argparse.Namespace(**{**vars(options), "np": ranks})
    command = job_command(where, load_library(), program, environment, binds=False)
    check_entry(where, ssh_of_job(where, environment))
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
        "[keras-dist]",
        f"a job of {ranks} ranks to finish",
        f"exit code {ended.code}" + (f" and {told}" if told else ""),
        "Try: keras-dist run -np 2 hostname",
    )
