"""`keras-dist doctor`: checks whether jobs can run here, and gives remedies."""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

from keras_dist import errors
from keras_dist.launch.cli.findings import (
    Finding,
    of_a_job,
    of_the_launcher,
    of_the_machine,
    of_the_packages,
)
from keras_dist.launch.cli.measured import measure
from keras_dist.launch.cli.options import add_host_options

NBYTES = 16 * 2**20  # of the test reduction
WIDTH = 15


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        "doctor",
        description="Checks packages, host and MPI, and starts two ranks. The exit code is 1 if "
        "no job can run.",
        allow_abbrev=False,
    )
    parser.set_defaults(act=_print_findings)
    add_host_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _print_findings(options: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if jobs can run, else 1."""
    troubles, told = 0, []
    for finding in _findings(options):
        troubles += finding.is_trouble
        told.append(dataclasses.asdict(finding))
        if not options.json:
            _print(finding)
    if options.json:
        print(json.dumps({"is_well": not troubles, "findings": told}, indent=2))
    elif not troubles:
        print(f"{'Start a job':{WIDTH}}keras-dist run -np 2 python train.py")
    return 1 if troubles else 0


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from of_the_packages()
    try:
        yield from of_the_machine()
        yield from of_the_launcher()
        begin = time.monotonic()
        found = measure(options, 2, [NBYTES])
        yield from of_a_job(found, time.monotonic() - begin)
    except (errors.LaunchError, errors.ArgumentError) as error:
        yield Finding("Trouble", str(error), "No job can run until this is fixed.", True)


def _print(finding: Finding) -> None:
    print(f"{finding.what:{WIDTH}}{finding.text}", flush=True)
    if finding.remedy:
        print(f"{'':{WIDTH - 3}}{'!!' if finding.is_trouble else '->'} {finding.remedy}")
