"""Compares the speed of fit that `keras-dist bench` predicts with a measured fit.

    python benchmarks/predict.py [--backend tensorflow|jax|torch] [--models mlp cnn] [--hosts 1 2]

Two ranks on one host, and one rank on each of two hosts, which are network namespaces of this
machine, see scripts/hosts: root is needed. Predictions and fits of a model take turns.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import (
    answer,
    conclude,
    launcher,
    load,
    options_of,
    parser,
    slug,
    surroundings,
    table,
)
from models import MODELS

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from namespaces import INTERFACE, MPICH, Unavailable, make_hosts

RANKS = 2
BOUND = 0.2  # of the measured speed
STEPS = 16
PLACES = {1: "one host", 2: "two hosts"}
COMMAND = [sys.executable, "-m", "keras_dist.launch.cli"]


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    made.add_argument("--hosts", type=int, nargs="+", choices=list(PLACES), default=list(PLACES))
    models = ["mlp", "cnn", "resnet50"]
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=models)
    options = options_of(made, work)
    os.environ |= {"KERAS_BACKEND": options.backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    before, found = load(), {}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: save(name, Path(folder)) for name in options.models}
        for count in options.hosts:
            try:
                with place(count) as enter:
                    for name, file in files.items():
                        print(name, "on", PLACES[count], "...", flush=True)
                        rounds = 1 if options.quick else 3
                        found[count, name] = compare(enter, name, file, rounds)
                        print(found[count, name], flush=True)
            except Unavailable as error:
                made.error(f"no test hosts: {error}")
    report(options, before, found)


def save(name, folder):
    """Saves a model, compiled, and returns its path."""
    import keras

    path = folder / f"{name}.keras"
    MODELS[name].compiled(keras.optimizers.SGD(0.01)).save(path)
    return path


@contextlib.contextmanager
def place(count):
    """Makes the hosts; yields a function that runs keras-dist on the first, for ranks on all."""

    def run(prefix, settings, hosts, command, *arguments):
        subcommand = [*COMMAND, command, "-np", str(RANKS), *hosts]
        done = subprocess.run(
            [*prefix, *subcommand, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, **settings},
        )
        return done.stdout

    if count == 1:
        # Open MPI would refuse to start as root.
        settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        yield lambda *command: run([], settings, [], *command)
        return
    if "--oversubscribe" in launcher():
        raise Unavailable("two hosts are measured with MPICH")
    with make_hosts(count) as (hosts, reach):
        settings = {**MPICH, "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(reach)}
        settings["HYDRA_IFACE"] = INTERFACE
        names = ["-H", ",".join(f"{host.name}:{RANKS // count}" for host in hosts)]
        passed = [f"--env={name}" for name in ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL")]
        yield lambda *command: run(hosts[0].enter, settings, [*names, *passed], *command)


def compare(enter, name, file, rounds):
    """Returns predicted and measured samples/s, one of each for each round."""
    predicted, measured = [], []
    for _ in range(rounds):
        batch = MODELS[name].batch_size
        told = enter("bench", "--model", file, "--batch-size", batch, "--sizes", "1M", "--json")
        predicted.append(json.loads(told.splitlines()[-1])["samples_per_second"])
        path = file.with_name("task.json")
        path.write_text(json.dumps({"model": name}))
        enter("run", sys.executable, Path(__file__).resolve(), "--worker", path)
        measured.append(json.loads(path.with_suffix(".out").read_text()))
    return {"predicted": predicted, "measured": measured}


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist

    keras_dist.init()
    from contenders import WARM_STEPS, make_clock, make_fit

    name = json.loads(Path(path).read_text())["model"]
    steps = WARM_STEPS + STEPS
    clock = make_clock(steps)
    make_fit("ours", MODELS[name], steps)(clock)
    if keras_dist.rank() == 0:
        rate = keras_dist.size() * STEPS * MODELS[name].batch_size / clock.seconds
        answer(path, rate)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    text = [f"# keras-dist bench, {options.backend}, {RANKS} ranks", surroundings(before)]
    text.append("## Samples/s of fit\n")
    body, rows = [], []
    for (count, name), rates in found.items():
        predicted, measured = (statistics.median(rates[of]) for of in ("predicted", "measured"))
        title, share = MODELS[name].title, predicted / measured
        body.append([f"{title}, {PLACES[count]}", f"{predicted:.0f}", f"{measured:.0f}"])
        within = abs(share - 1) <= BOUND
        row = f"{title}, {PLACES[count]}: predicted / measured", "0.80 to 1.20"
        rows.append((*row, f"{share:.2f}", within))
    text.append(table(["model", "predicted", "measured"], body))
    conclude(options.output, slug(f"predict_{options.backend}"), text, rows)


if __name__ == "__main__":
    main()
