"""`keras-dist bench`: the cost of gradient reductions between ranks on this machine.

Reductions of float32 gradients are measured on 2, 4, 8, ... ranks up to `-np`. Nothing else runs
at the same time; where reductions overlap with computation, a step of training hides a part of
them.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from keras_dist import errors
from keras_dist.launch.cli.command import (
    check_entry,
    job_command,
    number_of_ranks,
    settings_of,
    ssh_of_job,
)
from keras_dist.launch.cli.job_process import run_job
from keras_dist.launch.cli.mpiexec import load_library
from keras_dist.launch.cli.options import add_host_options

SIZES = ("4K", "64K", "1M", "16M", "100M")
UNITS = {"": 0, "K": 1, "M": 2, "G": 3}
FLOAT_NBYTES = 4
MARK = "keras_dist measured: "
SECONDS = 300


def add_to(commands: Any, name: str) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        name,
        description=" ".join(__doc__.split("\n\n", 1)[1].split()),
        allow_abbrev=False,
    )
    parser.set_defaults(act=_bench)
    add_host_options(parser)
    parser.add_argument(
        "--sizes", nargs="+", type=_count(1024), default=[_count(1024)(size) for size in SIZES],
        metavar="BYTES", help=f"sizes to measure ({' '.join(SIZES)})",
    )  # fmt: skip
    parser.add_argument(
        "--parameters", type=_count(1000), metavar="N",
        help="also measure the gradients of a model of N parameters, such as 25.6M",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    for removed in ("--model", "--batch-size"):
        parser.add_argument(removed, help=argparse.SUPPRESS)


def _bench(options: argparse.Namespace) -> int:
    if options.model or options.batch_size:
        raise errors.ArgumentError(
            "[keras-dist bench]",
            "no --model and no --batch-size: predictions have been removed",
            "one of them",
            "Pass --parameters with the number that model.summary() shows, and measure fit with "
            "keras_dist.callbacks(throughput=True).",
        )
    if options.np is None:
        try:
            options.np = number_of_ranks(options, dict(os.environ))
        except errors.ArgumentError:
            options.np = 2
    sizes = list(options.sizes)
    if options.parameters:
        sizes.append(FLOAT_NBYTES * options.parameters)
    below = [2**power for power in range(1, max(1, math.ceil(math.log2(options.np))))]
    runs = {ranks: measure(options, ranks, sizes) for ranks in [*below, options.np]}
    seconds = {
        ranks: {int(size): time for size, time in run["seconds"].items()}
        for ranks, run in runs.items()
    }
    found = runs[options.np]
    if options.json:
        about = {"library": found["library"], "hosts": found["hosts"], "seconds": seconds}
        print(json.dumps(about))
        return 0
    print(f"keras_dist by {found['library'].split(',')[0]} on {len(found['hosts'])} host(s).")
    print("A reduction of float32, in milliseconds of the slowest rank, and GB/s of gradients:\n")
    _print_row("size", *(f"{ranks} ranks" for ranks in runs))
    for size in sizes:
        times = (of[size] for of in seconds.values())
        _print_row(
            _format_size(size), *(f"{1e3 * time:.3f} ({size / time / 1e9:.1f})" for time in times)
        )
    return 0


def _count(base: int) -> Any:
    def count(text: str) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.upper())
        number = int(float(found[1]) * base ** UNITS[found[2]]) if found else 0
        if number < FLOAT_NBYTES:
            raise argparse.ArgumentTypeError(f"expected a number such as 25.6M: {text!r}")
        return number

    return count


def _format_size(size: int) -> str:
    units = [(size / 1024**power, f"{unit}iB") for unit, power in UNITS.items() if power]
    number, unit = next((pair for pair in reversed(units) if pair[0] >= 1), units[0])
    return f"{number:.4g} {unit}"


def _print_row(first: str, *others: str) -> None:
    print(first.ljust(10) + "".join(text.rjust(22) for text in others))


def measure(options: argparse.Namespace, ranks: int, sizes: Iterable[int]) -> dict[str, Any]:
    """Runs `keras_dist.launch.microbench` with sizes in bytes, and returns the JSON it prints."""
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
