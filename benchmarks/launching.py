"""Times the command line: its help, and what `keras-dist run` adds to mpiexec.

    python benchmarks/launching.py [--rounds 9]

Contenders take turns; every number is a median of seconds. Both start `true` on two ranks.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import (
    RESULTS,
    last_line,
    launcher,
    load,
    machine,
    make_folder,
    mpi,
    table,
    verdicts,
    write,
)
from turns import in_turn

SCRIPT = Path(sys.executable).with_name("keras-dist")
PROGRAM = [SCRIPT] if SCRIPT.exists() else [sys.executable, "-m", "keras_dist.launch.cli"]
COMMANDS = {
    "help": [*PROGRAM, "--help"],
    "run": [*PROGRAM, "run", "-np", "2", "true"],
    "mpiexec": [*launcher(), "-n", "2", "true"],
}
TITLES = {
    "help": "keras-dist --help",
    "run": "keras-dist run -np 2 true",
    "mpiexec": "mpiexec -n 2 true",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="how often each is started")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    make_folder(parser, options.output)
    before = load()
    found = in_turn(COMMANDS, options.rounds, seconds)
    body = [[TITLES[name], f"{statistics.median(found[name]):.3f}"] for name in COMMANDS]
    print(text := f"{mpi()}; {machine()}; {before}.\n\n{table(['command', 'seconds'], body)}\n")
    needed = statistics.median(found["help"])
    pairs = zip(found["run"], found["mpiexec"], strict=True)
    more = statistics.median(run - alone for run, alone in pairs)
    rows = [
        (TITLES["help"], "<= 0.2 s", f"{needed:.3f} s", needed <= 0.2),
        (f"{TITLES['run']}, beyond mpiexec", "<= 0.5 s", f"{more:.3f} s", more <= 0.5),
    ]
    print(verdicts(rows))
    slug = mpi().replace(" ", "").lower()
    write(
        options.output, f"launching_{slug}", "\n".join([text, verdicts(rows), "", last_line(rows)])
    )
    print(last_line(rows))


def seconds(name):
    begin = time.perf_counter()
    subprocess.run(COMMANDS[name], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
