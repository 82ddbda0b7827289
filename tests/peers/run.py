"""Runs tests of Keras and of Horovod on two ranks, and prints a table of their outcomes.

    scripts/peers keras                       # downloads the source archive of the pinned Keras
    scripts/peers horovod PATH                # PATH: a checkout of Horovod 0.28
    scripts/peers keras --backends torch --files 'optimizers/*' --write

A job ends at its first failure that is not expected, and the rest of the tests run in a new one. A
test has failed if it fails as the first of a job, so no outcome depends on a failure before it.
Outcomes are kept in `build/peers`; `--write` writes those of all runs to docs/compatibility.md.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "peers"
PAGE = ROOT / "docs" / "compatibility.md"
sys.path.insert(0, str(ROOT / "tests"))

from start_jobs import launcher, lean  # noqa: E402

BACKENDS = "tensorflow", "jax", "torch"
KINDS = "passed", "failed", "skipped", "expected"
JOB_SECONDS = 4 * 3600
OPTIONS = ["-q", "--color=no", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
OPTIONS += ["-p", "ranks.conftest", "-p", "peers.plugin"]
OPTIONS += ["-o", "addopts=", "-o", "filterwarnings=default"]
# Files of tests that need a package, which the environment of the tests lacks.
NEEDS = {
    "keras/src/callbacks/orbax_checkpoint_test.py": "orbax",
    "keras/src/trainers/data_adapters/grain_dataset_adapter_test.py": "grain",
}
# Tests that take minutes in one process as well.
TOO_LONG = {
    # A loop in Python, in `scatter` of Keras' torch backend, over ten million samples.
    "torch": ["keras/src/metrics/iou_metrics_test.py::MeanIoUTest::test_big_chunk"],
}
# Patterns of the files of each suite, and the backends that they run on.
FILES = {
    "keras": {
        f"keras/src/{pattern}_test.py": BACKENDS
        for pattern in (
            "trainers/trainer",
            "trainers/compile_utils",
            "trainers/epoch_iterator",
            "trainers/data_adapters/*",
            "callbacks/*",
            "wrappers/sklearn",
            "saving/*",
            "optimizers/*",
            "metrics/*",
        )
    },
    "horovod": {
        "test/parallel/test_torch.py": ("torch",),
        "test/parallel/test_adasum_pytorch.py": ("torch",),
        "test/parallel/test_tensorflow.py": ("tensorflow",),
        "test/parallel/test_adasum_tensorflow.py": ("tensorflow",),
        "test/parallel/test_tensorflow2_keras*.py": ("tensorflow",),
        "test/parallel/test_tensorflow_process_sets*.py": ("tensorflow",),
        "test/parallel/test_process_sets_*.py": ("tensorflow",),
    },
}


# --- Where the tests come from


def keras_source():
    """Returns the folder of the source archive of the pinned Keras, which is downloaded once."""
    pins = (ROOT / "constraints.txt").read_text()
    release = re.search(r"^keras==(.*)$", pins, re.M)[1]
    folder = BUILD / f"keras-{release}"
    if not folder.exists():
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", BUILD]
        only_source = ["--no-deps", "--no-binary", ":all:"]
        subprocess.run([*download, *only_source, f"keras=={release}"], check=True)
        with tarfile.open(f"{folder}.tar.gz") as archive:
            archive.extractall(BUILD, filter="data")
    return folder


def files_of(suite, source, backend, wanted):
    """Returns the files of a suite for a backend whose names match one of the patterns."""
    files = {
        path.relative_to(source).as_posix()
        for pattern, backends in FILES[suite].items()
        for path in source.glob(pattern)
        if backend in backends
    }
    files -= {file for file, package in NEEDS.items() if not importlib.util.find_spec(package)}
    return sorted(
        file for file in files if any(fnmatch.fnmatch(file, f"*{one}*") for one in wanted)
    )


# --- Jobs


def run_files(suite, source, files, backend, limit):
    """Yields the outcomes and texts of the tests of a job, and the files that are left after it."""
    done = [*TOO_LONG.get(backend, [])]
    while files:
        lines, status, output = run_job(suite, source, files, backend, done, limit)
        outcomes = settled(suite, backend, lines, output)
        failed = any(outcome == "failed" for outcome, _ in outcomes.values())
        ran = [line["test"] for line in lines if line["outcome"] != "not collected"]
        ended_early = ran and (ran[-1] not in outcomes or outcomes[ran[-1]][0] == "failed")
        if ended_early:
            files = files[files.index(ran[-1].partition("::")[0]) :]
        elif ran or outcomes or status in (0, 5):
            if status not in (0, 5) and not failed:
                outcomes[f"{files[-1]}::(end of the job)"] = "failed", output
            files = []
        else:
            outcomes[f"{files[0]}::(start of the job)"] = "failed", output
            files = files[1:]
        done += outcomes
        yield outcomes, files


def settled(suite, backend, lines, output):
    """Returns the outcomes that count: failures that are expected, or are the first of the job."""
    missing = {line["test"]: line["text"] for line in lines if line["outcome"] == "not collected"}
    last = {line["test"]: line for line in lines if line["test"] not in missing}
    outcomes = {}
    for test, line in last.items():
        lost = line["outcome"] == "began"  # the job ended within this test
        expected = not lost and reason_of(suite, test, backend)
        if (lost or line["outcome"] == "failed") and outcomes and not expected:
            break
        outcomes[test] = ("failed", output) if lost else (line["outcome"], line["text"])
    collection = {f"{file}::(collection)": ("failed", text) for file, text in missing.items()}
    return {**collection, **outcomes}


def run_job(suite, source, files, backend, done, limit):
    """Runs the tests of files that are not done; returns the records, exit status and output."""
    with tempfile.TemporaryDirectory() as folder:
        record, listed = Path(folder, "record"), Path(folder, "done")
        record.touch()
        listed.write_text(json.dumps(done))
        environment = {
            **environment_of(suite, backend),
            "PYTHONHASHSEED": "0",  # sets have the same order on all ranks
            "PEERS_SUITE": suite,
            "PEERS_RECORD": str(record),
            "PEERS_EXPECTED": json.dumps(
                [f"*{one}" for each in expected_on(suite, backend) for one in each["tests"]]
            ),
            "PEERS_DONE": str(listed),
            "PEERS_LIMIT": str(limit),
        }
        command = [*launcher(), "-n", "2", sys.executable, "-m", "pytest", *OPTIONS]
        command += ["--rootdir", source, *files]
        with Path(folder, "output").open("w+") as output:
            job = subprocess.Popen(
                command,
                cwd=source,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = job.wait(JOB_SECONDS)
            except BaseException as stop:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                if not isinstance(stop, subprocess.TimeoutExpired):
                    raise
                status = -signal.SIGKILL
            output.seek(0)
            lines = [json.loads(line) for line in record.read_text().splitlines()]
            return lines, status, output.read()[-20_000:]


def environment_of(suite, backend):
    """Returns the environment of a job; tests of Keras need the packages that it can use."""
    compiled = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(BUILD / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_COMPILATION_CACHE_MAX_SIZE": "100000000",
    }
    set_by_caller = {**os.environ, "KERAS_BACKEND": backend}
    environment = set_by_caller if suite == "keras" else lean(KERAS_BACKEND=backend)
    folders = [str(ROOT / "tests"), str(ROOT)]
    if suite == "horovod":
        folders.append(str(ROOT / "tests" / "lean"))
    return {
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **environment,
        **compiled,
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
    }


# --- Tables


def expected_of(suite):
    """Returns the expected differences of a suite: tables with `tests`, `reason` and `backends`."""
    text = Path(__file__).with_name("expected.toml").read_text()
    return tomllib.loads(text).get(suite, [])


def reason_of(suite, test, backend):
    """Returns why a test is expected to fail on a backend, or `None`."""
    for difference in expected_on(suite, backend):
        if any(fnmatch.fnmatchcase(test, f"*{pattern}") for pattern in difference["tests"]):
            return difference["reason"]
    return None


def expected_on(suite, backend):
    return [one for one in expected_of(suite) if backend in one.get("backends", BACKENDS)]


def counts_of(suite, backend, outcomes):
    """Returns the number of tests of each kind."""
    return Counter(
        "expected" if outcome == "failed" and reason_of(suite, test, backend) else outcome
        for test, outcome in outcomes.items()
    )


def kept_of(suite, backend):
    """Returns the outcomes of earlier runs by file and test."""
    path = BUILD / f"{suite}-{backend}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(suite, backend, outcomes):
    """Adds the outcomes of files to those of earlier runs."""
    together = {**kept_of(suite, backend), **outcomes}
    path = BUILD / f"{suite}-{backend}.json"
    path.write_text(json.dumps(together, indent=1, sort_keys=True))


def tests_of(file, outcomes):
    return {test: outcome for test, outcome in outcomes.items() if test.startswith(f"{file}::")}


def table(suite):
    """Returns the lines of the table by file, and of the list of differences."""
    counts = {
        (file, backend): counts_of(suite, backend, outcomes)
        for backend in BACKENDS
        for file, outcomes in kept_of(suite, backend).items()
    }
    backends = [one for one in BACKENDS if any(one == backend for _, backend in counts)]
    lines = ["| file | " + " | ".join(backends) + " |", "|---|" + "---|" * len(backends)]
    for file in sorted({file for file, _ in counts}):
        name = file.removeprefix("keras/src/").removeprefix("test/parallel/")
        cells = [said(counts.get((file, backend), {})) for backend in backends]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    totals = [
        said(sum((one for key, one in counts.items() if key[1] == backend), Counter()))
        for backend in backends
    ]
    lines += [
        f"| all | {' | '.join(totals)} |",
        "",
        "| expected difference | reason |",
        "|---|---|",
    ]
    for difference in expected_of(suite):
        tests = ", ".join(f"`{pattern}`" for pattern in difference["tests"])
        on = " and ".join(difference.get("backends", ()))
        lines.append(f"| {tests}{on and f' on {on}'} | {difference['reason']} |")
    return lines


def said(counts):
    """Returns how many tests passed and so on, in words."""
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts.get(kind)) or "-"


def write(suite, lines):
    """Writes a table between its two lines on the page."""
    begin, end = f"<!-- peers: {suite} -->", "<!-- end peers -->"
    before, found, rest = PAGE.read_text().partition(begin)
    if not found:
        sys.exit(f"{PAGE}: expected a line {begin}")
    after = rest.partition(end)[2]
    PAGE.write_text(before + "\n".join([begin, "", *lines, "", end]) + after)


def report(suite, backend, outcomes):
    """Prints failures, and differences that were expected in vain; returns how many failed."""
    unexpected = 0
    for test, (outcome, text) in outcomes.items():
        reason = reason_of(suite, test, backend)
        if outcome == "failed" and not reason:
            unexpected += 1
            print(f"\n--- {test} failed on {backend}:\n{text}", flush=True)
        elif outcome == "passed" and reason:
            print(
                f"\n--- {test} passes on {backend}. It was expected to fail: {reason}", flush=True
            )
    return unexpected


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", choices=FILES)
    parser.add_argument("path", nargs="?", type=Path, help="a checkout of Horovod 0.28")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=[*BACKENDS])
    parser.add_argument("--files", nargs="+", default=["*"], help="patterns; default: all files")
    parser.add_argument("--limit", type=float, help="seconds of a test (default 300; Horovod 60)")
    parser.add_argument("--write", action="store_true", help="write all outcomes to the page")
    options = parser.parse_args()
    if options.suite == "horovod" and not options.path:
        parser.error("horovod needs the path of a checkout: scripts/peers horovod PATH")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the job as well
    BUILD.mkdir(parents=True, exist_ok=True)
    source = options.path.resolve() if options.path else keras_source()
    limit = options.limit or {"keras": 300, "horovod": 60}[options.suite]
    unexpected = 0
    for backend in options.backends:
        files = files_of(options.suite, source, backend, options.files)
        found = {}
        for outcomes, left in run_files(options.suite, source, files, backend, limit):
            unexpected += report(options.suite, backend, outcomes)
            found |= {test: outcome for test, (outcome, _) in outcomes.items()}
            complete = set(files) - set(left)
            keep(options.suite, backend, {file: tests_of(file, found) for file in complete})
    lines = table(options.suite)
    print("\n".join(lines))
    if options.write:
        write(options.suite, lines)
    sys.exit(1 if unexpected else 0)


if __name__ == "__main__":
    main()
