"""Values, speed and faults of keras_dist on GPUs: the parts of `scripts/gpu-proof`, as jobs.

Every part is a job with a time limit whose result is printed at once: a part that hangs loses only
itself. Without a GPU the parts run small, over the tests' double of NCCL, and measure nothing.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from common import launcher, make_folder, table  # noqa: E402  (after the path of keras_dist)
from gpu_parts import PARTS  # noqa: E402

HEAD = ("what", "bound", "measured", "")
WHOLE_SECONDS = 470


@dataclasses.dataclass(frozen=True)
class Part:
    """A job of a proof.

    Args:
        title: its name.
        work: the function of `gpu_parts` that the ranks run.
        backend: torch or jax.
        seconds: its limit.
        ranks: number of ranks. Defaults to 2.
        fails: whether its ranks end with an error. Defaults to `False`.
        variables: further environment variables. Defaults to none.
    """

    title: str
    work: str
    backend: str
    seconds: int
    ranks: int = 2
    fails: bool = False
    variables: dict = dataclasses.field(default_factory=dict)


def parts():
    """Returns all parts, the most important ones first."""
    found = [Part("versions", "versions", "torch", 40, 1)]
    found.append(Part("torch loop", "loop", "torch", 90))
    for backend in ("jax", "torch"):
        found.append(Part(f"fit, {backend}", "fit", backend, 75))
    for backend in ("jax", "torch"):
        found.append(Part(f"one rank, {backend}", "one_rank", backend, 60, 1))
    found.append(Part("values", "values", "torch", 60))
    for backend in ("jax", "torch"):
        found.append(Part(f"one process, {backend}", "alone", backend, 60, 1))
        found.append(Part(f"equality, {backend}", "equality", backend, 75))
    found.append(Part("public calls", "calls", "torch", 60))
    found.append(Part("calls of NCCL", "log", "torch", 45))
    found.append(Part("no memory on one rank", "no_memory", "torch", 40))
    found.append(Part("a rank is killed", "killed", "torch", 60, fails=True))
    found.append(Part("rarer values", "rare_values", "torch", 40))
    return found


def main():
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--only", nargs="+", metavar="PART", help="titles of parts")
    made.add_argument("--output", type=Path, help="file for the table; default: printed only")
    made.add_argument("--seconds", type=int, default=WHOLE_SECONDS, help="for all parts")
    made.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        PARTS[options.worker[0]](Path(options.worker[1]))
        return
    if options.output:
        make_folder(made, options.output.parent)
    gpus = count_gpus()
    if not gpus:
        print("No GPU here: every part runs small on the CPU, over the tests' double of NCCL.")
        print("Its numbers say nothing about a GPU.\n")
    end, rows, said = time.monotonic() + options.seconds, [], []
    with tempfile.TemporaryDirectory() as folder:
        for part in parts():
            if options.only and part.title not in options.only:
                continue
            found, lines = run(part, gpus, folder, end)
            rows += found
            said += lines
    text = "\n".join([*said, "", table(HEAD, rows)])
    print(f"\n{text}")
    if options.output:
        options.output.write_text(text + "\n")
    bad = [row[0] for row in rows if row[3] == "no"]
    print(f"{len(rows)} results, {len(bad)} not as they must be" + "".join(f"\n- {b}" for b in bad))
    sys.exit(1 if bad else 0)


def run(part, gpus, folder, end):
    """Runs a part and prints what it found; returns rows for the table, and lines before it."""
    began, out = time.monotonic(), Path(folder) / "found.json"
    limit = min(part.seconds, end - began)
    print(f"=== {part.title} ({limit:.0f} s at most)", flush=True)
    if importlib.util.find_spec(part.backend) is None or limit < 5:
        reason = "no time is left" if limit < 5 else f"without {part.backend}"
        return [(part.title, "", f"not run: {reason}", "")], []
    out.unlink(missing_ok=True)
    prefix = [*launcher(), "-n", str(part.ranks)]
    command = [*prefix, sys.executable, __file__, "--worker", part.work, str(out)]
    log = Path(folder) / "log"
    with log.open("wb") as written:
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env=environment(part, gpus, folder),
            start_new_session=True,
        )
        try:
            status = job.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(job.pid, signal.SIGTERM)
            time.sleep(1)
            os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
            job.wait()
    seconds = time.monotonic() - began
    text = log.read_text(errors="replace")
    found = json.loads(out.read_text()) if out.exists() else {"rows": [], "lines": []}
    if part.fails:
        found["rows"].append(ends(status, text, seconds))
    elif status != 0:
        how = f"none within {limit:.0f} s" if status is None else f"ended with status {status}"
        found["rows"].append((part.title, "a result", how, "no"))
        print("\n".join(text.splitlines()[-40:]))
    for line in found["lines"]:
        print(line)
    for row in found["rows"]:
        print("  ".join(row))
    print(f"--- {seconds:.1f} s", flush=True)
    return [tuple(row) for row in found["rows"]], found["lines"]


def ends(status, text, seconds):
    """Returns the row of a job of which a rank is killed."""
    title = "a rank is killed while the other waits on the GPU"
    words = ("Error", "signal", "SIGNAL", "died")
    errors = [line for line in text.splitlines() if any(word in line for word in words)]
    told = errors[0].strip()[:90] if errors else "no error is printed"
    how = f"still there after {seconds:.0f} s" if status is None else f"ends in {seconds:.0f} s"
    ok = "yes" if status not in (None, 0) else "no"
    return title, "the job ends with an error", f"{how}; {told}", ok


def environment(part, gpus, folder):
    """Returns the environment variables of a part."""
    variables = {
        **os.environ,
        "KERAS_BACKEND": part.backend,
        "KERAS_DIST_STALL_ABORT_SECONDS": "30",
        "GPU_PROOF_FOLDER": folder,
        "GPU_PROOF_SMALL": "" if gpus else "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if not gpus:
        variables["_KERAS_DIST_GPU_DOUBLE"] = str(ROOT / "tests" / "gpu_double.py")
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif gpus < part.ranks:
        variables.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        variables.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".35")
    if part.work == "log" and gpus:
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL"}
        variables |= {**log, "NCCL_DEBUG_FILE": f"{folder}/nccl.%p"}
    return variables | part.variables


def count_gpus():
    """Returns the number of GPUs, asked of the driver in a process of its own."""
    code = "from keras_dist import _gpu; r = _gpu.load_runtime(); print(r.count() if r else 0)"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    asked = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths.split(os.pathsep)!r}; {code}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if asked.returncode:
        print(asked.stderr)
    return int(asked.stdout or 0)


if __name__ == "__main__":
    print(f"{platform.node()}, {time.strftime('%Y-%m-%d %H:%M')}") if len(sys.argv) < 2 else None
    main()
