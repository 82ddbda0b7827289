"""Measures how many images per second train.py learns from on 1, 2 and 4 ranks.

    python examples/cats_vs_dogs/scaling.py --out examples/cats_vs_dogs

writes `scaling.csv` and `scaling.png`. Each rank has one core unless --threads says otherwise, as
each node of a cluster brings its own: what is asked is what more ranks add. As many processes that
never meet show what the machine itself allows.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import figures
import matplotlib.pyplot as plt
import pandas as pd

TRAIN = Path(__file__).with_name("train.py")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=1, help="cores for each rank (1)")
    parser.add_argument("--epochs", type=int, default=8, help="the first does not count (8)")
    parser.add_argument("--out", type=Path, default=Path(), help="directory for table and figure")
    parser.add_argument("more", nargs="*", help="behind --: options of train.py")
    args = parser.parse_args()

    rows = [measure(n, args.threads, args.epochs, args.more) for n in args.ranks]
    measured = pd.DataFrame(rows)
    print(measured.to_string(index=False))
    measured.to_csv(args.out / "scaling.csv", index=False)

    plt.switch_backend("agg")
    figures.scaling(measured).savefig(args.out / "scaling.png")


def measure(ranks, threads, epochs, more):
    """Trains on so many ranks, and in so many processes apart; returns a row of the table."""
    print(f"{ranks} rank{'s' if ranks > 1 else ''} ...", flush=True)
    options = ["--data", "drawings", "--epochs", str(epochs), *more]
    launcher = Path(sys.executable).with_name("keras-dist")
    [together] = train([launcher, "run", "-np", str(ranks)], 1, threads, options)
    apart = train([], ranks, threads, options)
    return {
        "ranks": ranks,
        "images_per_second": round(together.samples_per_second, 1),
        "apart": round(sum(median.samples_per_second for median in apart), 1),
        "waiting": round(together.waiting, 3),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
    }


def train(launcher, count, threads, options):
    """Starts jobs at the same time and returns the median epoch of each, without the first.

    Processes that never meet have their fastest epochs at different times.
    """
    environment = {**os.environ, "KERAS_DIST_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as out:
        outs = [Path(out) / str(number) for number in range(count)]
        jobs = [
            subprocess.Popen(
                [*launcher, sys.executable, TRAIN, "--out", out, *options],
                env=environment,
                stdout=subprocess.DEVNULL,
            )
            for out in outs
        ]
        if sum(job.wait() for job in jobs):
            raise SystemExit("train.py has failed")
        histories = [pd.read_csv(out / "history.csv")[1:] for out in outs]
    return [history.median() for history in histories]


if __name__ == "__main__":
    main()
