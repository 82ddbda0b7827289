"""`keras-dist bench`: the cost of gradient reductions on this machine, and for a model.

Predictions interpolate linearly between the measured sizes, and extrapolate in proportion to the
bytes beyond the largest. They hold for a reduction with nothing else running.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from keras_dist import errors
from keras_dist.launch.cli.command import number_of_ranks
from keras_dist.launch.cli.measured import measure
from keras_dist.launch.cli.options import add_host_options

__all__ = ["add_to", "predict"]

SIZES = ("4K", "64K", "1M", "16M", "100M")
UNITS = {"": 0, "K": 1, "M": 2, "G": 3}
FLOAT_NBYTES = 4
SPEED = 0.9  # of one rank without reductions


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        "bench",
        description=" ".join(__doc__.split("\n\n", 1)[1].split()),
        allow_abbrev=False,
    )
    parser.set_defaults(act=_bench)
    add_host_options(parser)
    parser.add_argument(
        "--sizes", nargs="+", type=_count(1024), default=[_count(1024)(size) for size in SIZES],
        metavar="BYTES", help=f"sizes to measure ({' '.join(SIZES)})",
    )  # fmt: skip
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--parameters",
        type=_count(1000),
        metavar="N",
        help="number of parameters of a model, such as 25.6M",
    )
    model.add_argument("--model", metavar="FILE", help="a saved Keras model")
    parser.add_argument("--json", action="store_true", help="print JSON")


def predict(seconds: Mapping[int, float], nbytes: int) -> float:
    """Returns the predicted seconds of a reduction.

    Args:
        seconds: measured seconds by size in bytes.
        nbytes: size in bytes.
    """
    sizes = sorted(seconds)
    if nbytes >= sizes[-1]:
        return seconds[sizes[-1]] * nbytes / sizes[-1]
    above = next(size for size in sizes if size >= nbytes)
    below = max((size for size in sizes if size < nbytes), default=above)
    if below == above:
        return seconds[above]
    share = (nbytes - below) / (above - below)
    return seconds[below] + share * (seconds[above] - seconds[below])


def _bench(options: argparse.Namespace) -> int:
    parameters = options.parameters
    if options.model is not None:
        parameters = _parameters_of(options.model)
    options.np = options.np or _number_of_ranks(options)
    runs = {ranks: measure(options, ranks, options.sizes) for ranks in _up_to(options.np)}
    seconds = {
        ranks: {int(size): time for size, time in run["seconds"].items()}
        for ranks, run in runs.items()
    }
    nbytes = None if parameters is None else FLOAT_NBYTES * parameters
    predicted = {} if nbytes is None else {n: predict(of, nbytes) for n, of in seconds.items()}
    first = runs[options.np]
    if options.json:
        found = {"library": first["library"], "hosts": first["hosts"], "seconds": seconds}
        print(json.dumps({**found, "gradient_nbytes": nbytes, "predicted_seconds": predicted}))
        return 0
    print(f"keras_dist by {first['library'].split(',')[0]} on {len(first['hosts'])} host(s).")
    print("A reduction of float32, in milliseconds of the slowest rank, and GB/s of gradients:\n")
    _print_row("size", *(f"{ranks} ranks" for ranks in runs))
    for size in options.sizes:
        times = (of[size] for of in seconds.values())
        _print_row(
            _format_size(size), *(f"{1e3 * time:.3f} ({size / time / 1e9:.1f})" for time in times)
        )
    if nbytes is not None:
        _print_prediction(parameters, nbytes, predicted)
    else:
        print("\nPass --parameters 25.6M or --model FILE for the prediction of a model.")
    return 0


def _print_prediction(parameters: int, nbytes: int, predicted: Mapping[int, float]) -> None:
    print(f"\n{parameters:,} parameters, {nbytes / 1e6:.1f} MB of gradients in float32:\n")
    _print_row("ranks", "reduction", f"{SPEED:.0%} of the speed")
    for ranks, time in predicted.items():
        step = time * SPEED / (1 - SPEED)
        _print_row(str(ranks), f"{1e3 * time:.1f} ms", f"steps of {1e3 * step:.0f} ms")
    print(
        f"\nA rank keeps {SPEED:.0%} of its speed alone where its steps compute as long as that,\n"
        "if the reduction does not overlap with computation. Interpolated linearly from the table."
    )


def _number_of_ranks(options: argparse.Namespace) -> int:
    try:
        return number_of_ranks(options, dict(os.environ))
    except errors.ArgumentError:
        return 2


def _up_to(ranks: int) -> list[int]:
    """Returns 2, 4, 8, ... below a number, and the number."""
    powers = [2**power for power in range(1, max(1, math.ceil(math.log2(ranks))))]
    return [*powers, ranks]


def _parameters_of(path: str) -> int:
    from keras_dist.launch import microbench

    try:
        return microbench.count_parameters(path)
    except Exception as error:  # Keras and the model's layers may raise anything
        raise errors.ArgumentError(
            errors.explain(
                "[keras-dist bench]",
                "a model that Keras loads",
                f"{path}: {str(error).splitlines()[0]}",
                "Pass --parameters instead of --model: model.summary() shows the number.",
            )
        ) from None


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
    return f"{number:g} {unit}"


def _print_row(first: str, *others: str) -> None:
    print(first.ljust(10) + "".join(text.rjust(22) for text in others))
