"""Times Keras fit on the ranks of one node, with and without somebody who watches.

    python benchmarks/watching.py [--ranks 2] [--quick]

All contenders live in one job and train the same model in turn, a short fit each: a job that
cannot be watched, one that can, and one that `keras-dist top` reads from. A ratio is the median of
the ratios round by round. Beside it stands the time on a core of the threads that do the work, as
a share of the fit: it is exact where a ratio is lost in what else the machine does.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import answer, conclude, load, options_of, parser, ratio, start, surroundings, table
from turns import in_turn

CONTENDERS = {"off": "KERAS_DIST_TOP=0", "on": "nobody looks", "watched": "keras-dist top reads"}
BOUND = 0.01  # of a step
TOP = "import sys; from keras_dist.launch.cli import main; sys.exit(main(['top', '--json']))"
SETTLE_SECONDS = 2.0  # for keras-dist top to start


def main():
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    os.environ |= {"KERAS_DIST_TOP": "0", "KERAS_BACKEND": "tensorflow"}
    before = load()
    rounds, steps = (3, 10) if options.quick else (15, 20)
    report(options, before, start(__file__, options.ranks, {"rounds": rounds, "steps": steps}))


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras
    from contenders import WARM_STEPS, make_clock
    from models import MODELS
    from ranks import barrier, everyones

    import keras_dist

    keras_dist.init()
    task = json.loads(Path(path).read_text())
    steps = WARM_STEPS + task["steps"]
    cnn = MODELS["cnn"]
    data = cnn.data(steps * cnn.batch_size, keras_dist.rank())
    model = cnn.compiled(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    shares = {name: [] for name in CONTENDERS}

    def milliseconds(name):
        callbacks = [] if name == "off" else [keras_dist.callbacks.ProgressCallback()]
        with watched(name):
            barrier()
            clock, begun, used = make_clock(steps), time.perf_counter(), seconds_on_core()
            fitted = {"batch_size": cnn.batch_size, "epochs": 1, "verbose": 0}
            model.fit(*data, callbacks=[*callbacks, clock], **fitted)
            share = (seconds_on_core() - used) / (time.perf_counter() - begun)
        shares[name].append(max(row[0] for row in everyones([share])))
        return 1e3 * max(row[0] for row in everyones([clock.seconds])) / task["steps"]

    for name in CONTENDERS:
        milliseconds(name)
    found = in_turn(CONTENDERS, task["rounds"], milliseconds)
    if keras_dist.rank() == 0:
        answer(path, {"milliseconds": found, "shares": shares})


@contextlib.contextmanager
def watched(name):
    """Lets this job be watched, or not, within one that was started without."""
    from ranks import barrier

    from keras_dist import runtime
    from keras_dist.monitor.endpoints import Endpoints

    if name == "off":
        yield
        return
    comm = runtime.communicator()
    attendant, reader = Endpoints(comm), None
    if name == "watched":
        if comm.rank == 0:
            reader = subprocess.Popen([sys.executable, "-c", TOP], stdout=subprocess.DEVNULL)
        time.sleep(SETTLE_SECONDS)
    yield
    barrier()
    if reader is not None:
        reader.kill()
        reader.wait()
    attendant.close()


def seconds_on_core():
    """Returns how long the threads that watching takes have run so far, where Linux tells."""
    total = 0
    for thread in threading.enumerate():
        if thread.name in ("keras_dist collector", "keras_dist top"):
            with contextlib.suppress(OSError):
                path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
                total += int(path.read_text().split()[0])
    return total / 1e9


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    times, shares = found["milliseconds"], found["shares"]
    text = [f"# Watching a fit, {options.ranks} ranks"]
    text.append(surroundings(before))
    body = [
        [
            words,
            f"{statistics.median(times[name]):.1f}",
            f"{ratio(times[name], times['off']):.3f}",
            f"{statistics.median(shares[name]):.3%}",
        ]
        for name, words in CONTENDERS.items()
    ]
    text.append(table(["", "ms a step", "ratio", "threads' share of a core"], body))
    rows = []
    for name in ("on", "watched"):
        value = ratio(times[name], times["off"]) - 1
        rows.append((f"{CONTENDERS[name]}: a step", "< 1 % more", f"{value:.2%}", value < BOUND))
        share = max(shares[name])
        row = f"{CONTENDERS[name]}: threads, worst fit", "< 1 % of a core", f"{share:.3%}"
        rows.append((*row, share < BOUND))
    conclude(options.output, "watching", text, rows)


if __name__ == "__main__":
    main()
