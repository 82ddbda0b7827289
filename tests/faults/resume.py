"""Kills a rank at random batches and compares the results with those of an uninterrupted run.

    python tests/faults/resume.py                     20 kills on each backend
    python tests/faults/resume.py --kills 3 --backends jax --seed 5

Each job is `keras-dist run --max-restarts N` of scripts/resume_training.py with N kills: a fit of
a model with batch normalization, with EarlyStopping, ReduceLROnPlateau, ModelCheckpoint,
CSVLogger and a learning rate warmup, with a backup after each epoch or each batch. The table shows
how many jobs ended with weights and optimizers that are equal bit for bit, equal files, and equal
history and callback states.
"""

import argparse
import collections
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from start_jobs import RUN, lean

TRAINING = Path(__file__).parent / "scripts" / "resume_training.py"
BACKENDS = ("tensorflow", "jax", "torch")
LIMIT_SECONDS = 300
NAMES = ("weights", "files", "history")
BATCHES = 5


def main(arguments=None):
    """Runs the jobs and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="on each backend")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="sizes to draw from")
    parser.add_argument("--at-once", type=int, default=1, help="kills in one job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    table = ["| backend | kills | equal weights | equal files | equal history |"]
    table.append("|---|---|---|---|---|")
    everything = True
    for backend in options.backends:
        equal = compare(backend, options)
        cells = [str(equal[name]) for name in NAMES]
        table.append(f"| {' | '.join([backend, str(options.kills), *cells])} |")
        everything &= all(equal[name] == options.kills for name in NAMES)
        print("\n".join(table), flush=True)
    return int(not everything)


def compare(backend, options):
    """Returns the number of jobs with equal results, by column."""
    draw = random.Random(options.seed)
    known, equal, left = {}, collections.Counter(), options.kills
    while left > 0:
        ranks, save_freq = draw.choice(options.ranks), draw.choice(["epoch", "1", "2", "3"])
        if ranks not in known:
            known[ranks] = run(backend, ranks, "epoch")
        batches = len(known[ranks]["history"][0][0][0]) * BATCHES
        count = min(left, options.at_once)
        places = sorted(draw.sample(range(batches), count))
        strikes = [(*divmod(place, BATCHES), draw.randrange(ranks)) for place in places]
        found = run(backend, ranks, save_freq, *strikes)
        same = {name: found[name] == known[ranks][name] for name in NAMES}
        equal.update({name: count for name in NAMES if same[name]})
        words = "as uninterrupted" if all(same.values()) else f"DIFFERENT {same}"
        print(f"{backend} {ranks} ranks, save_freq={save_freq}, killed at {strikes}: {words}")
        sys.stdout.flush()
        left -= count
    return equal


def run(backend, ranks, save_freq, *strikes):
    """Runs a job with kills at the given batches; returns its results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [TRAINING, folder, save_freq, *(",".join(map(str, one)) for one in strikes)]
        command = [*RUN, "-np", str(ranks)]
        ended = subprocess.run(
            [*command, "--max-restarts", str(len(strikes)), sys.executable, *words],
            env=lean(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3", FAULT_FOLDER=name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS * (1 + len(strikes)),
        )
        if ended.returncode or len([*folder.glob("struck-*")]) != len(strikes):
            raise SystemExit(f"exit code {ended.returncode}\n{ended.stdout}")
        return result(folder)


def result(folder):
    """Returns the results of a job, by column of the table."""
    told = json.loads((folder / "end.json").read_text())
    ours = ("end.json", "pid-", "struck-")
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(ours)]
    named = {path.name: contents(path) for path in files}
    history = [[each["history"], each["meter"], each["early stopping"]] for each in told]
    return {"weights": [each["weights"] for each in told], "files": named, "history": history}


def contents(path):
    """Returns the contents of a file; HDF5 files are compared without their timestamps."""
    if path.suffix != ".h5":
        return path.read_bytes()
    found = {}

    def note(name, one):
        if isinstance(one, h5py.Dataset):
            found[name] = np.asarray(one).tobytes()

    with h5py.File(path) as file:
        file.visititems(note)
    return found


if __name__ == "__main__":
    sys.exit(main())
