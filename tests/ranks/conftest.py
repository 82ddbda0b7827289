"""Runs the same tests on all ranks of a job, which agree on the outcome of each.

Every rank runs its own pytest: `mpiexec -n 3 python -m pytest tests/ranks`. Rank 0 writes
the report. A test that fails on one rank fails on all. A test that does not end is aborted
after its time limit, with the stacks of all ranks.
"""

import contextlib
import faulthandler
import functools
import gc
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from mpi4py import MPI

LIMIT_SECONDS = 120.0
# Seconds a rank waits for the reports of the others before it aborts the job.
GRACE_SECONDS = 2.0

# Outcomes use a communicator of their own, separate from the messages under test.
world = MPI.COMM_WORLD.Dup()
rank, size = world.Get_rank(), world.Get_size()
where = f"[rank {rank} of {size}]"
if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):  # see tests/suite.py
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, str(rank))

# The property of a test that holds a difference and the titles of its rows.
DIFFERENCE = "difference"

# Random examples would differ between ranks.
hypothesis.settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("ranks")

uncaptured = None
collection_errors = []
unshared_failure = ""
outcomes_by_row = {"parity": {}, "exactness": {}}  # by mark, row and test
differences_seen = []


# --- Agreement of the ranks


def exchange(place, value):
    """Returns the values of all ranks; aborts the job if the ranks run different tests."""
    if all_say(repr((place, value))):
        return (value,) * size
    places, values = zip(*world.allgather((place, value)), strict=True)
    if len(set(places)) > 1:
        end_job(f"{where} The ranks have lost each other. This one is at: {place}.")
    return values


def all_say(text):
    """Returns whether the text is equal on all ranks, which it almost always is."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    least = np.empty(2, np.int64)
    arrived = world.Iallreduce(np.array([digest, -digest]), least, MPI.MIN)
    nap = 2e-5  # most ranks are there at once, and three times in each test
    while not arrived.Test():
        time.sleep(nap)  # a blocking call would use the cores of ranks that still work
        nap = min(2 * nap, 1e-3)
    return least[0] == -least[1]


def agree(report):
    """Makes the report of one phase the same on every rank; a failure anywhere is a failure."""
    global unshared_failure
    unshared_failure = report.longreprtext if report.failed else ""
    verdicts = exchange(f"{report.when} of {report.nodeid}", (report.outcome, account(report)))
    unshared_failure = ""
    outcomes = {outcome for outcome, _ in verdicts}
    if size == 1 or outcomes in ({"passed"}, {"skipped"}):
        return
    report.outcome = "failed"
    report.longrepr = merge(verdicts)
    report.sections = []
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def account(report):
    """Returns the traceback and output of a rank in a phase."""
    if report.passed:
        return ""
    printed = [f"{title}:\n{text}" for title, text in report.sections]
    return "\n".join([report.longreprtext, *printed])


def merge(verdicts):
    """Returns one text for all ranks; ranks with equal texts share a paragraph."""
    ranks_by_verdict = {}
    for number, verdict in enumerate(verdicts):
        ranks_by_verdict.setdefault(verdict, []).append(str(number))
    failures_first = sorted(ranks_by_verdict.items(), key=lambda item: item[0][0] != "failed")
    return "\n".join(
        f"[rank {', '.join(ranks)} of {size}] {outcome}\n{text}"
        for (outcome, text), ranks in failures_first
    )


# --- The time limit


@contextlib.contextmanager
def limit(what, seconds):
    """Aborts the job if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, give_up, (what, seconds))
    timer.name = "keras_dist tests"  # not a thread of a script: it calls no operations
    timer.daemon = True
    # For a rank that never releases the interpreter lock, so that its timer thread cannot run.
    faulthandler.dump_traceback_later(seconds + 5 * GRACE_SECONDS, exit=True, file=uncaptured)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def give_up(what, seconds):
    failed = f"\nIt had failed before:\n{unshared_failure}" if unshared_failure else ""
    end_job(f"{where} {what} takes longer than {seconds:g} seconds.{failed}\nStack:\n{stacks()}")


def stacks():
    """Returns the stacks of all other threads, without the frames of pytest."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        _, _, others = file.read().partition("\n\n")
    return "".join(
        line
        for line in others.splitlines(True)
        if not re.search(r"/(_pytest|pluggy)/|<frozen", line)
    )


def end_job(last_words):
    print(f"\n{last_words}", file=uncaptured, flush=True)
    time.sleep(GRACE_SECONDS)
    MPI.COMM_WORLD.Abort(1)


# --- Outcomes for each backend: records for tests/parity.py


def note(item, report):
    """Records the outcome of a test under its rows, and the differences that it has seen."""
    for mark, rows in outcomes_by_row.items():
        for marker in item.iter_markers(mark):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            outcomes = rows.setdefault(marker.args[0].format(**parameters), {})
            if report.skipped:
                outcomes[item.nodeid] = report.longrepr[2]
            elif report.failed or report.when == "call":
                outcomes[item.nodeid] = report.outcome
    if report.when == "call":
        differences_seen.extend(seen for name, seen in item.user_properties if name == DIFFERENCE)


def write_record(folder):
    """Writes the records to a new file in a folder."""
    keras = sys.modules.get("keras")
    if any(outcomes_by_row.values()) and keras:
        backend = keras.backend.backend()
        record = {
            "backend": backend,
            "ranks": size,
            **outcomes_by_row,
            DIFFERENCE: differences_seen,
        }
        path = Path(folder, f"{backend}-{size}-{uuid.uuid4()}.json")
        path.write_text(json.dumps(record))


# --- What a test must not leave to those after it

BEFORE = pytest.StashKey()
# Variables that keras_dist reads. Frameworks set others when they are imported.
READ = re.compile("_?KERAS_|HOROVOD_|SLURM_|PMI|OMPI_|CUDA_")


def shared_state():
    """Returns what the tests of a process share, by name."""
    keras, job = sys.modules.get("keras"), sys.modules.get("keras_dist.runtime.job")
    table = job and job._sets
    # Threads of an executor end when the garbage collector has found it.
    threads = [one.name for one in threading.enumerate() if not one.daemon]
    return {
        "environment": {name: text for name, text in os.environ.items() if READ.match(name)},
        "folder": os.getcwd(),
        "threads": sorted(name for name in threads if not name.startswith("ThreadPoolExecutor")),
        "types": keras and (keras.config.floatx(), keras.config.dtype_policy().name),
        "process sets": table and [each.ranks for each in table._sets],
    }


def left_since(before):
    """Returns what differs from an earlier state: what it was, and is now, by name."""
    pairs = {name: (before[name], now) for name, now in shared_state().items()}
    # Unknown before: the test has imported Keras or initialized keras_dist.
    return {name: pair for name, pair in pairs.items() if pair[0] not in (None, pair[1])}


# --- pytest's hooks, in call order


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    global uncaptured
    uncaptured = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
    config.addinivalue_line(
        "markers", f"limit(seconds): how long the test may take (default {LIMIT_SECONDS:g})"
    )
    config.addinivalue_line(
        "markers", "parity(row): shows a row of docs/backends.md; {name} stands for a parameter"
    )
    config.addinivalue_line("markers", "jobs(*names): where the test runs, see tests/suite.py")
    config.addinivalue_line("markers", "exactness(row): the same for docs/exactness.md")
    config.addinivalue_line(
        "markers", "tuned: pipelines of TensorFlow are tuned, as users have them"
    )
    if rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    with limit("Collection", LIMIT_SECONDS):
        return (yield)


def pytest_collection_modifyitems(config, items):
    """Leaves out tests that belong to other jobs of tests/suite.py, where each must be named."""
    for item in items:
        if "ranks" in item.path.parts and not item.get_closest_marker("jobs"):
            pytest.exit(f"Expected pytestmark = pytest.mark.jobs(...) at {item.nodeid}", 1)
    if job := os.environ.get("TEST_JOB"):
        from suite import runs_in

        chosen = []
        for item in items:
            named = {name for mark in item.iter_markers("jobs") for name in mark.args}
            if runs_in(job, named):
                chosen.append(item)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_collectreport(report):
    if report.failed:
        collection_errors.append(report.longreprtext)


def pytest_collection_finish(session):
    tests = [item.nodeid for item in session.items]
    found = exchange("the end of collection", (tests, collection_errors))
    if any(other != found[0] for other in found):
        pytest.exit(f"The ranks have collected different tests.\n{differences(found)}", 1)
    gc.freeze()  # frameworks live until exit: the garbage collector can ignore them


def differences(found):
    """Returns the tests that only some ranks collected, and collection errors."""
    common = set.intersection(*(set(tests) for tests, _ in found))
    return "\n".join(
        "\n".join([f"[rank {number} of {size}]", *(set(tests) - common), *errors])
        for number, (tests, errors) in enumerate(found)
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("limit")
    with limit(item.nodeid, marker.args[0] if marker else LIMIT_SECONDS):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    report = yield
    agree(report)
    note(item, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[BEFORE] = shared_state()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Fails a test that leaves something to those after it in the same process."""
    result = yield
    left = left_since(item.stash[BEFORE])
    assert not left, f"{where} The test leaves (before, now): {left}"
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_internalerror(excrepr):
    end_job(f"{where} pytest itself failed:\n{excrepr}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    session.exitstatus = max(exchange("the end of the session", int(exitstatus)))
    if rank == 0 and "PARITY_RECORDS" in os.environ:
        write_record(os.environ["PARITY_RECORDS"])


# --- Fixtures


@pytest.fixture(autouse=True)
def same_seed():
    """Starts every test from the same random state on all ranks."""
    random.seed(0)
    np.random.seed(0)
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def untuned_pipelines(request, monkeypatch):
    """Disables TensorFlow's autotuning, whose thread may delay the destruction of a pipeline.

    Tests marked `tuned` keep it; see `keras_dist.data.tf_pipelines`.
    """
    if "tensorflow" in sys.modules and not request.node.get_closest_marker("tuned"):
        leave_untuned(monkeypatch)


def leave_untuned(monkeypatch):
    from tensorflow.data import Options
    from tensorflow.python.data.ops.dataset_ops import DatasetV2

    prepared = DatasetV2._apply_debug_options

    def untuned(dataset):
        options = Options()
        options.autotune.enabled = False
        return prepared(dataset.with_options(options))

    monkeypatch.setattr(DatasetV2, "_apply_debug_options", untuned)


@pytest.fixture(autouse=True)
def unoptimized_graphs(request):
    """Disables TensorFlow's graph optimization, except in tests of graphs that users trace.

    The optimization before the first step takes longer than the steps. It is enabled for other
    numbers of ranks.
    """
    by_hand = (
        "test_faces",
        "test_loops",
        "test_tensorflow_ops",
        "test_tensorflow_tape",
        "test_xla",
    )
    if "tensorflow" in sys.modules and size == 2:
        off = request.module.__name__.rpartition(".")[2] not in by_hand
        optimizer = sys.modules["tensorflow"].config.optimizer
        optimizer.set_experimental_options({"disable_meta_optimizer": off})


@pytest.fixture(autouse=True)
def untranslated_graphs(monkeypatch):
    """Makes `torch.compile` run its graphs eagerly, without a C++ compiler.

    The graph breaks and the code between them are the same; compilation would take seconds for each
    graph.
    """
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def shared_tmp_path():
    """An empty directory for all ranks, removed when all have finished the test."""
    path = Path(world.bcast(tempfile.mkdtemp() if rank == 0 else None))
    yield path
    world.Barrier()
    if rank == 0:
        shutil.rmtree(path)


@pytest.fixture
def rows_travelled(monkeypatch):
    """Whether each reduction of a table was one of rows."""
    from keras_dist import _engine
    from keras_dist._engine.collectives.tables import SparseTable

    found, reduce = [], SparseTable.reduce

    def recorded(*arguments):
        result = reduce(*arguments)
        found.append(result is not None)
        return result

    reduce_slices = _engine.collectives.reduce_slices

    def recorded_slices(*arguments, **options):
        found.append(True)
        return reduce_slices(*arguments, **options)

    monkeypatch.setattr(SparseTable, "reduce", recorded)
    monkeypatch.setattr(_engine.collectives, "reduce_slices", recorded_slices)
    return found
