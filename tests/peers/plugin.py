"""A plugin of pytest: runs tests written for one process, or for Horovod, on all ranks of a job.

`tests/ranks/conftest.py`, loaded beside it, makes the ranks agree on each outcome and ends a
test that hangs. Rank 0 appends each begin and end to the file PEERS_RECORD. The job ends after its
first failure that is not expected, so that no test runs after it.
"""

import contextlib
import fnmatch
import functools
import json
import os
import re
import sys
import threading
import types
from pathlib import Path

import pytest
from _pytest.nodeid import coerce_node_id
from mpi4py import MPI
from ranks.conftest import exchange, limit, rank

DONE = frozenset(json.loads(Path(os.environ["PEERS_DONE"]).read_text()))
EXPECTED = json.loads(os.environ.get("PEERS_EXPECTED", "[]"))  # patterns

session_of_rank = None
outcomes = {}


def record(**line):
    if rank == 0:
        with open(os.environ["PEERS_RECORD"], "a") as file:
            print(json.dumps(line), file=file)


# --- What the tests find


def distribute_optimizers():
    """Makes an optimizer distributed when a model is compiled with it, or when it is first used.

    An optimizer inside another one stays as it is.
    """
    import keras
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.trainers.trainer import Trainer

    import keras_dist
    from keras_dist.training.distributed import is_distributed
    from keras_dist.training.model_state import optimizers_inside

    keras_dist.init()
    using = threading.local()
    original_compile = Trainer.compile

    @functools.wraps(original_compile)
    def compile_distributed(self, optimizer="rmsprop", *args, **kwargs):
        optimizer = keras.optimizers.get(optimizer)
        if isinstance(optimizer, BaseOptimizer) and not is_distributed(optimizer):
            optimizer = keras_dist.DistributedOptimizer(optimizer)
        return original_compile(self, optimizer, *args, **kwargs)

    def distributed_first(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            reduces = any(map(is_distributed, [self, *optimizers_inside(self)]))
            if reduces or getattr(using, "depth", 0):
                return nested(method, self, args, kwargs)
            keras_dist.DistributedOptimizer(self)
            return getattr(self, method.__name__)(*args, **kwargs)

        return call

    def nested(method, self, args, kwargs):
        using.depth = getattr(using, "depth", 0) + 1
        try:
            return method(self, *args, **kwargs)
        finally:
            using.depth -= 1

    Trainer.compile = compile_distributed
    for one in [BaseOptimizer, *subclasses(BaseOptimizer)]:
        for name in {"build", "apply"} & set(vars(one)):
            setattr(one, name, distributed_first(vars(one)[name]))


def subclasses(of):
    """Returns all subclasses of a class."""
    return [two for one in of.__subclasses__() for two in (one, *subclasses(one))]


def stand_in_for_conftest():
    """Adds the module `conftest` of Keras, which its source archive does not have."""
    import keras

    def skip_if_backend(name, reason):
        return pytest.mark.skipif(keras.backend.backend() == name, reason=reason)

    sys.modules["conftest"] = types.SimpleNamespace(skip_if_backend=skip_if_backend)


# --- pytest's hooks, in call order


def pytest_configure():
    if os.environ["PEERS_SUITE"] == "keras":
        distribute_optimizers()
        stand_in_for_conftest()
    else:
        from peers import horovod_names

        horovod_names.install()


def pytest_sessionstart(session):
    global session_of_rank
    session_of_rank = session


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:  # a parameter may be a function, whose address differs from rank to rank
        item._id = coerce_node_id(re.sub(r"at ?0x[0-9a-f]+", "", item.nodeid))
    items[:] = [item for item in items if item.nodeid not in DONE]
    for item in items:
        item.add_marker(pytest.mark.limit(float(os.environ["PEERS_LIMIT"])))


def pytest_collectreport(report):
    if report.failed:
        record(test=report.nodeid, outcome="not collected", text=report.longreprtext)


def pytest_runtest_logstart(nodeid):
    record(test=nodeid, outcome="began")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Ends the job soon if a test has failed on this rank and another rank waits within it."""
    failed = call.excinfo and not isinstance(call.excinfo.value, pytest.skip.Exception)
    with limit(f"{item.nodeid} on other ranks", 20) if failed else contextlib.nullcontext():
        return (yield)


def pytest_runtest_logreport(report):
    """Keeps the worst outcome of the phases of a test."""
    if report.failed and not any(fnmatch.fnmatchcase(report.nodeid, one) for one in EXPECTED):
        session_of_rank.shouldfail = "The job ends after a failure."
    kept = outcomes.get(report.nodeid, ("passed", ""))
    if report.failed or (report.skipped and kept[0] == "passed"):
        outcomes[report.nodeid] = report.outcome, report.longreprtext


def pytest_runtest_logfinish(nodeid):
    outcome, text = outcomes.get(nodeid, ("passed", ""))
    record(test=nodeid, outcome=outcome, text=text)


def pytest_unconfigure():
    """Ends a job whose ranks may be at different operations."""
    if session_of_rank.shouldfail:
        exchange("the end after a failure", None)
        MPI.COMM_WORLD.Abort(1)
