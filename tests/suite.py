"""Runs the tests, each in the jobs that stand at it, and prints where the time went.

    scripts/test                      the short run, before a commit
    scripts/test --all                everything
    scripts/test PATH::NAME ...       these tests, files or folders, in each of their jobs
    scripts/test -k broadcast -x      options are passed to each pytest; paths come before them

Tests in tests/ranks run on all ranks of a job. Their marks `jobs` name the jobs of `JOBS` in
which they run: `pytestmark` those of all tests of a file, a test or a parameter further ones. All
other tests run once, in this Python. The short run leaves out tests that are marked `slow`, those
that start jobs but for the ones marked `short`, and jobs that repeat the tests of others. A run of
everything compares docs/backends.md, docs/exactness.md and docs/reliability.md with the outcomes.
No slow test and no job begins after the time in SLOW_UNTIL, in seconds since the epoch.
"""

import ast
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS = ROOT / "tests" / "ranks"
FAULTS = ROOT / "tests" / "faults"
PYTHON = {"mpich": ROOT / ".venv/bin/python", "openmpi": ROOT / ".venv-openmpi/bin/python"}
NOT_SLOW = "not slow"
ON_PAGES = "tests/house/test_docs.py::test_python"  # scripts/docs runs the code on the pages
NOTHING_SELECTED, NOT_STARTED = 5, 213  # exit statuses of pytest, and of Open MPI's mpiexec
TRIES = 3  # to start a job
# Tests that start jobs get a second run. pyproject.toml leaves the plugin out of all other tests.
ONCE_MORE = ["-p", "pytest_rerunfailures", "--reruns", 1]
PASSED_AGAIN = "passed when run again: "  # printed by tests/conftest.py


@dataclasses.dataclass(frozen=True)
class Job:
    """Ranks that run tests.

    Args:
        ranks: their number.
        backend: of Keras.
        library: `"mpich"` or `"openmpi"`.
        short: the marks of its tests in the short run, as for `pytest -m`; none of them by default.
        marked: the marks of its tests.
        recorded: whether its outcomes are those of docs/backends.md and docs/exactness.md.
        hidden: packages that Keras would import if it found them.
        variables: further variables of the environment.
    """

    ranks: int
    backend: str = "tensorflow"
    library: str = "mpich"
    short: str = ""
    marked: str = NOT_SLOW
    recorded: bool = True
    hidden: str = "sklearn jax"
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def double(ranks: int, backend: str, slow: bool) -> Job:
    """Returns a job in which a test double stands in for NCCL, and the host for a GPU.

    Args:
        ranks: their number.
        backend: of Keras.
        slow: whether the double delays every operation.
    """
    of_double = {"_KERAS_DIST_GPU_DOUBLE": str(ROOT / "tests/gpu_double.py")}
    variables = {**of_double, "GPU_DOUBLE": "slow" if slow else ""}
    return Job(ranks, backend, recorded=False, variables=variables)


def nodes(ranks: int, count: int) -> Job:
    """Returns a job on nodes that MPICH emulates. JAX starts fastest."""
    return Job(ranks, "jax", variables={"MPIR_CVAR_NUM_CLIQUES": str(count)})


# On several ranks, jobs for equality on JAX use its default optimizations.
OPTIMIZED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
JOBS = {
    # One rank shows that keras_dist changes nothing.
    "tensorflow-1": Job(1),
    "jax-1": Job(1, "jax"),
    "torch-1": Job(1, "torch"),
    # Custom loops of JAX work on each backend.
    "tensorflow-2": Job(
        2, hidden="sklearn", short=f"(parity or exactness) and {NOT_SLOW} and not long"
    ),
    "tensorflow-3": Job(3),
    # Four ranks: Adasum in two rounds, and disjoint process sets of several ranks. torch traces
    # nothing; its custom loops represent those of the other backends.
    "torch-4": Job(4, "torch"),
    "nodes-2x2": nodes(4, 2),
    "nodes-2+1": nodes(3, 2),
    "nodes-4x1": nodes(4, 4),
    "nodes-torch-2": dataclasses.replace(nodes(2, 2), backend="torch", recorded=False),
    "jax-2": Job(2, "jax", short=f"exactness and {NOT_SLOW}"),
    "jax-3": Job(3, "jax", variables=OPTIMIZED),
    "torch-2": Job(2, "torch", short=NOT_SLOW),
    "torch-3": Job(3, "torch", marked=""),  # slow ones as well
    "double-tensorflow-2": double(2, "tensorflow", slow=True),
    "double-jax-2": double(2, "jax", slow=True),
    "double-torch-2": double(2, "torch", slow=True),
    "double-torch-3": double(3, "torch", slow=False),
    # Training and resuming call the same operations with every MPI library: with this one run the
    # tests of the engine, process sets and copies in memory, and a fit with each optimizer.
    "openmpi-3": Job(3, library="openmpi"),
    "training-double-torch-2": double(2, "torch", slow=False),
}
# Names for several jobs.
GROUPS = {
    "training": ("tensorflow-2", "torch-2", "training-double-torch-2"),
    # What runs on the host alone, wherever the arrays of a model are.
    "hooks": ("tensorflow-2", "torch-2"),
    "engine": ("tensorflow-2", "openmpi-3"),
    "double": ("double-tensorflow-2", "double-jax-2", "double-torch-2"),
    "equality": ("tensorflow-3", "jax-1", "jax-3", "torch-1", "torch-3"),
}


def runs_in(job: str, named: Iterable[str]) -> bool:
    """Returns whether a test whose marks name some jobs runs in one."""
    return any(job in (name, *GROUPS.get(name, ())) for name in named)


def files_of(job: str) -> list[Path]:
    """Returns the files with tests that may run in a job."""
    return [path for path in rank_files() if job in jobs_of(path)]


def rank_files() -> list[Path]:
    """Returns the files of tests/ranks with tests."""
    return sorted(RANKS.rglob("test_*.py"))


@functools.cache
def jobs_of(path: Path) -> list[str]:
    """Returns the jobs that a file of tests/ranks names, in the order of `JOBS`.

    Raises:
        SystemExit: it names none, or an unknown one.
    """
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.jobs":
            named |= {ast.literal_eval(argument) for argument in node.args}
    if not named or not named <= {*JOBS, *GROUPS}:
        known = ", ".join([*JOBS, *GROUPS])
        sys.exit(f"{path}: expected pytest.mark.jobs(...) with names of {known}, received {named}")
    return [job for job in JOBS if any(job in (name, *GROUPS.get(name, ())) for name in named)]


class Suite:
    """Runs parts of the tests and notes their outcomes.

    Args:
        options: for each pytest.
        is_whole: whether nothing is left out. Defaults to `False`.

    Attributes:
        parts: name, outcome and seconds of each part that has run.
        records: folder of the records for tests/parity.py.
    """

    def __init__(self, options: list[str], is_whole: bool = False):
        self._options, self.is_whole = options, is_whole
        self.parts: list[tuple[str, str, float]] = []
        self._counts = {"passed": 0, "failed": 0}
        self._again: list[str] = []
        self._began = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="keras_dist-tests-"))
        self.records = self._folder / "records"
        self.records.mkdir()
        self._environment = {
            **os.environ,
            "PARITY_RECORDS": str(self.records),
            "NOT_TESTED": str(self._folder / "not-tested"),
            # JAX takes seconds to compile a step: compiled steps are cached.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache/jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            # With a limit JAX locks the cache, so that jobs of tests can share it.
            "JAX_COMPILATION_CACHE_MAX_SIZE": "100000000",
        }

    def run(
        self, name: str, command: list[object], environment: Mapping[str, str], quiet: bool = False
    ) -> int:
        """Runs a part; returns its exit status.

        Args:
            name: of the part.
            command: the command.
            environment: its variables.
            quiet: whether to print the output at its end, as other parts run at the same time.
        """
        began, lines = time.monotonic(), []
        with subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            if not quiet:
                print(f"\n=== {name}", flush=True)
            for line in process.stdout or ():
                lines.append(line)
                if not quiet:
                    print(line, end="", flush=True)
        if quiet:
            print(f"\n=== {name}\n{''.join(lines)}", end="", flush=True)
        status, outcome = process.returncode, f"FAILED ({process.returncode})"
        if status == 0:
            outcome = "passed"
        elif status == NOTHING_SELECTED and not self.is_whole:
            outcome = "none selected"
        if status != NOT_STARTED:
            self.parts.append((name, outcome, time.monotonic() - began))
            self._count(lines, outcome.startswith("FAILED"))
        return status

    def run_here(
        self, name: str, *arguments: object, lean: bool = False, quiet: bool = False
    ) -> None:
        """Runs tests that start their own jobs; see `run` for `quiet`."""
        environment = (
            lean_environment(self._environment, "sklearn jax") if lean else self._environment
        )
        self.run(name, [*pytest_of("mpich"), *arguments, *self._options], environment, quiet)

    def run_job(
        self, name: str, tests: Iterable[object], quiet: bool = False, marked: str = ""
    ) -> None:
        """Runs tests of tests/ranks in a job; `marked` ones, or those that the job names."""
        job = JOBS[name]
        environment = {
            **lean_environment(self._environment, job.hidden.removesuffix(f" {job.backend}")),
            "KERAS_BACKEND": job.backend,
            "TEST_JOB": name,
            # These ranks have a cache each. What is locked takes longer the more it has.
            "JAX_COMPILATION_CACHE_MAX_SIZE": "-1",
            **job.variables,
        }
        if not job.recorded:
            del environment["PARITY_RECORDS"]
        marks = ["-m", marked or job.marked] if "-m" not in self._options else []
        command = [
            *mpiexec(job),
            *pytest_of(job.library),
            "--color=no",
            *tests,
            *marks,
            *self._options,
        ]
        # Rarely Open MPI's mpiexec fails before it starts a rank: it is started again.
        for _ in range(TRIES):
            if self.run(name, command, environment, quiet) != NOT_STARTED:
                return
            print("Open MPI's mpiexec did not start a rank.")
        self.parts.append((name, f"FAILED ({NOT_STARTED})", 0.0))

    def _count(self, lines: list[str], has_failed: bool) -> None:
        failed = self._counts["failed"]
        self._again += [line.rstrip() for line in lines if line.startswith(PASSED_AGAIN)]
        for line in lines:
            if re.match(r"=* ?\d+ (passed|failed|skipped|error|deselected).* in [\d.]+s", line):
                for count, what in re.findall(r"(\d+) (passed|failed|errors?)\b", line):
                    self._counts["passed" if what == "passed" else "failed"] += int(count)
        if has_failed and self._counts["failed"] == failed:  # ended early, or a page differs
            self._counts["failed"] += 1

    def check_pages(self) -> None:
        """Compares docs/backends.md and docs/exactness.md with the outcomes, if all have passed."""
        if self.is_whole and not self.failed:
            command = [PYTHON["mpich"], "tests/parity.py", "--check", self.records]
            self.run("docs/{backends,exactness}.md", command, self._environment)

    @property
    def failed(self) -> bool:
        """Whether a part has failed."""
        return any(outcome.startswith("FAILED") for _, outcome, _ in self.parts)

    def end(self) -> int:
        """Prints the summary; returns the exit status."""
        print("\n=== where the time went")
        for name, outcome, seconds in self.parts:
            print(f"{name:28} {outcome:14} {seconds:5.0f} s")
        print(f"{'all, some side by side':43} {time.monotonic() - self._began:5.0f} s")
        listed = self._folder / "not-tested"
        if listed.exists():  # what this machine lacks
            print("\n".join(sorted(set(listed.read_text().splitlines()))))
        if self.failed:
            print(f"The records for tests/parity.py are in {self.records}")
        else:
            shutil.rmtree(self._folder)
        for line in self._again:
            print(line)
        print(f"{self._counts['passed']} passed, {self._counts['failed']} failed")
        return int(self.failed or not self._counts["passed"])


def pytest_of(library: str) -> list[object]:
    """Returns the command of pytest with an MPI library."""
    return [PYTHON[library], "-m", "pytest"]


def mpiexec(job: Job) -> list[object]:
    """Returns the command that starts the ranks of a job."""
    # Open MPI refuses to run as root, and to start more ranks than cores, without these options.
    options = ["--allow-run-as-root", "--oversubscribe"] if job.library == "openmpi" else []
    return [PYTHON[job.library].with_name("mpiexec"), *options, "-n", str(job.ranks)]


def lean_environment(environment: Mapping[str, str], hidden: str) -> dict[str, str]:
    """Returns an environment without packages that Keras imports if it finds them."""
    folders = [str(ROOT / "tests/lean"), environment.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    return {**environment, "PYTHONPATH": path, "LEFT_OUT": hidden}


def run_everything(suite: Suite, is_short: bool) -> None:
    """Runs all tests, or those of the short run."""
    jobs = {name: job for name, job in JOBS.items() if job.short or not is_short}
    short = ["-m", "short"] if is_short else []
    marks = ["-m", NOT_SLOW] if is_short else ["--deselect", ON_PAGES]
    # Only the whole set makes the fault table.
    table = ["--fault-table", "check"] if suite.is_whole else []

    def run_hosts() -> None:
        if not is_short:
            suite.run_here("hosts", *ONCE_MORE, "tests/hosts", quiet=True)

    def run_alone_and_jobs() -> None:
        for name, job in jobs.items():
            if job.ranks == 1:
                suite.run_job(name, files_of(name), quiet=True)
        suite.run_here("jobs", *workers(2), *ONCE_MORE, "tests/jobs", *short, quiet=True)

    # Two cores are busy all the time: one rank needs one, and tests of one process another. Tests
    # on hosts wait for minutes, and faults for seconds, more than other jobs.
    with beside(suite, run_hosts), beside(suite, run_alone_and_jobs):
        suite.run_here("one process", *workers(2), "tests/house", "tests/unit", *marks)
        faults = [*workers(2), *ONCE_MORE, "tests/faults", *table, *short]
        suite.run_here("faults", *faults, lean=True)
    for name, job in jobs.items():
        if job.ranks > 1 and time.time() < float(os.environ.get("SLOW_UNTIL", "inf")):
            suite.run_job(name, files_of(name), marked=job.short if is_short else job.marked)
        elif job.ranks > 1:
            suite.parts.append((name, "FAILED (no time is left)", 0.0))
    suite.check_pages()


@contextlib.contextmanager
def beside(suite: Suite, call: Callable[[], object]) -> Iterator[None]:
    """Calls a function in another thread during the context, and waits for its end.

    Its error is a failed part: a thread would lose it, and the status would be that of the others.
    """

    def call_or_fail() -> None:
        try:
            call()
        except BaseException as error:  # sys.exit as well
            traceback.print_exc()
            suite.parts.append((call.__name__, f"FAILED ({type(error).__name__})", 0.0))

    other = threading.Thread(target=call_or_fail)
    other.start()
    try:
        yield
    finally:
        other.join()


def workers(count: int) -> list[object]:
    """Returns the options of pytest for some processes that share the tests."""
    return ["-n", count, "--dist", "worksteal"]


def run_some(suite: Suite, selected: list[str]) -> None:
    """Runs tests, files or folders, those of tests/ranks in each of their jobs."""
    on_ranks: list[str] = []
    here: list[object] = []
    of_faults: list[object] = []
    for test in selected:
        path = path_of(test)
        is_on_ranks = RANKS in (path, *path.parents)
        if path.is_dir():
            on_ranks += [str(file) for file in rank_files() if path in file.parents]
            here += [] if is_on_ranks else [test, "--ignore", RANKS]
        else:
            is_fault = FAULTS in path.parents
            (on_ranks if is_on_ranks else of_faults if is_fault else here).append(test)
    if here:
        suite.run_here("one process", *here)
    if of_faults:
        suite.run_here("faults", *of_faults, lean=True)
    for name in JOBS:
        if tests := [test for test in on_ranks if name in jobs_of(path_of(test))]:
            suite.run_job(name, tests)


def path_of(test: str) -> Path:
    """Returns the absolute path of the file or folder of a test."""
    return (ROOT / test.partition("::")[0]).resolve()


def main(arguments: list[str]) -> int:
    """Runs what the command line says; returns the exit status.

    Raises:
        SystemExit: a file does not exist.
    """
    is_short = "--all" not in arguments
    arguments = [argument for argument in arguments if argument != "--all"]
    selected = list(itertools.takewhile(lambda one: not one.startswith("-"), arguments))
    for test in selected:
        if not path_of(test).exists():
            sys.exit(f"Expected a file or folder of tests before options. Received: {test}")
    suite = Suite(arguments[len(selected) :], is_whole=not arguments and not is_short)
    if selected:
        run_some(suite, selected)
    else:
        run_everything(suite, is_short)
    return suite.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
