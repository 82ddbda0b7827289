"""`keras-dist bench`: the cost of gradient reductions on this machine, and for a model.

Predictions interpolate linearly between the measured sizes, and extrapolate in proportion to the
bytes beyond the largest. With --batch-size, the ranks also train the model for some steps, without
communication and on random data; a step of a real job takes as long as the slowest rank does, and
the reduction.
"""

import argparse
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist import errors
from keras_dist.launch.cli.command import number_of_ranks
from keras_dist.launch.cli.measured import measure, measure_steps
from keras_dist.launch.cli.options import add_host_options

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
    parser.add_argument(
        "--batch-size", type=_count(1000, least=1), metavar="N",
        help="train --model with N samples a rank and step, and predict the speed of fit",
    )  # fmt: skip
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


def predict_step(durations: Sequence[Sequence[float]], reduction: float) -> tuple[float, float]:
    """Returns the seconds of a step without communication, and those of a step with a reduction.

    Args:
        durations: seconds of steps that ranks took without waiting for each other, by rank.
        reduction: seconds of a reduction.
    """
    alone = statistics.fmean(statistics.fmean(steps) for steps in durations)
    slowest = statistics.fmean(map(max, zip(*durations, strict=True)))
    return alone, slowest + reduction


def _bench(options: argparse.Namespace) -> int:
    if options.batch_size and options.model is None:
        raise errors.ArgumentError(
            "[keras-dist bench]",
            "--model with --batch-size",
            "--batch-size alone",
            "Pass a saved model, compiled as it is to be trained.",
        )
    parameters, sizes = options.parameters, list(options.sizes)
    if options.model is not None:
        parameters = _parameters_of(options.model, compiled=options.batch_size is not None)
    if options.batch_size:
        sizes.append(FLOAT_NBYTES * parameters)
    options.np = options.np or _number_of_ranks(options)
    runs = {ranks: measure(options, ranks, sizes) for ranks in _up_to(options.np)}
    seconds = {
        ranks: {int(size): time for size, time in run["seconds"].items()}
        for ranks, run in runs.items()
    }
    nbytes = None if parameters is None else FLOAT_NBYTES * parameters
    predicted = {} if nbytes is None else {n: predict(of, nbytes) for n, of in seconds.items()}
    first = runs[options.np]
    fit: dict[str, float] = {}
    if options.batch_size:
        durations = measure_steps(options, options.np, options.model, options.batch_size)
        alone, step = predict_step(durations, predicted[options.np])
        rate = options.np * options.batch_size / step
        fit = {"step_alone_seconds": alone, "step_seconds": step, "samples_per_second": rate}
    if options.json:
        found = {"library": first["library"], "hosts": first["hosts"], "seconds": seconds}
        found |= {"gradient_nbytes": nbytes, "predicted_seconds": predicted}
        print(json.dumps({**found, **fit}))
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
        if fit:
            _print_fit(options, fit)
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


def _print_fit(options: argparse.Namespace, fit: Mapping[str, float]) -> None:
    alone, step = fit["step_alone_seconds"], fit["step_seconds"]
    print(
        f"\nfit on {options.np} ranks, batches of {options.batch_size}: "
        f"{fit['samples_per_second']:.0f} samples/s,\n{alone / step:.0%} of the speed without "
        f"communication: {1e3 * step:.1f} ms a step, and {1e3 * alone:.1f} ms without.\n"
        "A step takes as long as the slowest rank, and the reduction."
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


def _parameters_of(path: str, compiled: bool) -> int:
    from keras_dist.launch import microbench

    try:
        return microbench.count_parameters(path, compiled)
    except Exception as error:  # Keras and the model's layers may raise anything
        raise errors.ArgumentError(
            "[keras-dist bench]",
            f"a {'compiled ' * compiled}model that Keras loads",
            f"{path}: {str(error).splitlines()[0]}",
            "Pass --parameters instead of --model: model.summary() shows the number.",
        ) from None


def _count(base: int, least: int = FLOAT_NBYTES) -> Any:
    def count(text: str) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.upper())
        number = int(float(found[1]) * base ** UNITS[found[2]]) if found else 0
        if number < least:
            raise argparse.ArgumentTypeError(f"expected a number such as 25.6M: {text!r}")
        return number

    return count


def _format_size(size: int) -> str:
    units = [(size / 1024**power, f"{unit}iB") for unit, power in UNITS.items() if power]
    number, unit = next((pair for pair in reversed(units) if pair[0] >= 1), units[0])
    return f"{number:g} {unit}"


def _print_row(first: str, *others: str) -> None:
    print(first.ljust(10) + "".join(text.rjust(22) for text in others))
