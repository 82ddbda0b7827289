"""Ranks that make different calls all raise an error instead of a deadlock."""

import re

import pytest

ENDS = "an error on every rank that names the rank, what differs and the remedy"


def assert_all_told(ended, ranks, message):
    """Checks that the job failed and that the last line of every rank has the message."""
    assert ended.returncode != 0
    for rank in range(ranks):
        lines = [line for line in ended.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert message in lines[-1], ended.stdout


CALLS = {
    "another operation": (
        "ops.allreduce(1.0) if runtime.rank() == 0 else ops.barrier()",
        "[rank 1 of 2] Expected allreduce('value') as on rank 0. Received: barrier.",
    ),
    "another shape": (
        "ops.allreduce([0.0] * (3 + runtime.rank()))",
        "[rank 1 of 2] Expected 'value' with shape (3,) as on rank 0. Received: (4,).",
    ),
    "another dtype": (
        "ops.allreduce(np.ones(3, ['f4', 'f8'][runtime.rank()]))",
        "[rank 1 of 2] Expected 'value' with dtype float32 as on rank 0. Received: float64.",
    ),
    "another name": (
        "ops.allreduce(1.0, name='loss' if runtime.rank() == 0 else 'norm')",
        "[rank 1 of 2] Expected name='loss' in allreduce('loss') as on rank 0. Received: name=",
    ),
    "another root": (
        "ops.broadcast(1.0, root_rank=runtime.rank())",
        "[rank 1 of 2] Expected root_rank=0 in broadcast",
    ),
    "a root that is not there": (
        "ops.broadcast(1.0, root_rank=9)",
        "Expected root_rank to be a rank of this job",
    ),
    "a bad argument on one rank": (
        "ops.allreduce('text' if runtime.rank() == 1 else 1.0)",
        "[rank 1 of 2] Expected value to have a dtype",
    ),
}


@pytest.mark.fault(
    "a rank calls with another operation, shape, dtype, name or root", ENDS, within=5
)
@pytest.mark.parametrize("case", CALLS)
def test_a_different_call(job, case):
    text, message = CALLS[case]
    begin = "import numpy as np\nfrom keras_dist import ops\nruntime.init()\nfault()\n"
    assert_all_told(job(2, begin + text, bare=True), 2, message)


MODELS = """
import keras, numpy as np, keras_dist
keras_dist.init()
rank = keras_dist.rank()
def fit(layers, samples=8):
    layers = [keras.layers.Dense(units) for units in layers]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    data = keras_dist.data.shard((np.ones((samples, 6)), np.ones((samples, 1))), batch_size=4)
    fault()
    model.fit(data, verbose=0, callbacks=keras_dist.callbacks())
for options in dict(layers=[4] * (1 + 2 * rank)), dict(layers=[4], samples=1):
    try:
        fit(**options)
    except (keras_dist.errors.MismatchError, keras_dist.errors.DataError) as error:
        print(f"{rank}: {error}\\n", end="", flush=True)
fit([4 + rank])
"""


@pytest.mark.fault("a rank trains another model, more layers or other shapes", ENDS, within=10)
@pytest.mark.fault("too few samples for all ranks", "an error on every rank", within=10)
def test_a_different_model(job):
    ended = job(2, MODELS, KERAS_BACKEND="jax")
    same_model = "Build the same model, with the same optimizer, on every rank."
    assert_all_told(ended, 2, same_model)
    for rank in range(2):
        output = [line for line in ended.stdout.splitlines() if line.startswith(f"{rank}: ")]
        assert same_model in output[0], output
        assert "Expected at least 2 samples" in output[1], output


# --- A rank that has ended


LEFT = (
    "[rank 1 of 2] Expected allreduce('loss') as on rank 0. Received: the end of the script. "
    "Every rank must make the same calls and the same number of steps"
)


@pytest.mark.fault("a rank ends its script, or calls `sys.exit`, while others wait", ENDS, within=5)
@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)", "raise SystemExit(3)"])
def test_a_rank_that_ends_early(job, ending):
    text = f"""
from keras_dist import ops
if runtime.rank() == 1:
    fault()
    {ending}
else:
    ops.allreduce(1.0, name="loss")
"""
    ended = job(2, text, bare=True)
    assert ended.returncode != 0
    assert LEFT in ended.stdout


@pytest.mark.fault("a rank ends while others have queued operations", ENDS, within=5)
def test_a_rank_that_ends_while_others_have_more_queued(job):
    text = """
from keras_dist.ops import asynchronous
asynchronous.allreduce_async(1.0)
fault()
if runtime.rank() == 0:
    asynchronous.allreduce_async(1.0, name="loss")
"""
    ended = job(2, text, bare=True)
    assert ended.returncode != 0
    assert LEFT in ended.stdout


@pytest.mark.fault("a rank ends while others call a collective of a process set", ENDS, within=5)
@pytest.mark.parametrize("reduce", ["copy", "mpi"])
def test_a_rank_that_ends_while_others_call_on_a_process_set(job, reduce):
    text = """
from keras_dist import ops
from keras_dist.runtime.process_sets import ProcessSet
first, last = ProcessSet([0, 1]), ProcessSet([1, 2])
runtime.init(process_sets=[first, last])
fault()
if runtime.rank() == 1:
    ops.allreduce(1.0, name="loss", process_set=last)
"""
    ended = job(3, text, bare=True, KERAS_DIST_REDUCE=reduce)
    assert ended.returncode != 0
    assert (
        "[rank 2 of 3] Expected allreduce('loss') as on rank 1. Received: the end of the script. "
        "Every rank must make the same calls"
    ) in ended.stdout


TRAINING = """
import keras, numpy as np, keras_dist
keras_dist.init()
def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    return model
x, y = np.ones((8, 3)), np.ones((8, 1))
class Slow(keras.callbacks.Callback):
    def on_test_begin(self, logs=None):
        time.sleep(3)
class Test(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if keras_dist.rank() == 1 and epoch == 1:
            build().evaluate(x, y, verbose=0, callbacks=[Slow()])
def fit(callbacks=(), **options):
    options.update(batch_size=4, verbose=0, callbacks=keras_dist.callbacks(*callbacks))
    model.fit(x, y, **options)
model = build()
fit([Test()], epochs=2)
fault()
if keras_dist.rank() == 0:
    fit()
"""


@pytest.mark.fault(
    "a rank is in `evaluate` while another is in `fit`",
    "the root logs a warning with the stack after `KERAS_DIST_STALL_SECONDS`; the job continues",
    within=5,
)
@pytest.mark.fault("a rank is in `fit` when another has left training", ENDS, within=5)
def test_a_rank_in_evaluate_or_after_training_is_named_as_such(job):
    periods = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "0"}
    ended = job(2, TRAINING, KERAS_BACKEND="jax", **periods)
    assert ended.returncode != 0
    lines = ended.stdout.splitlines()
    waited = r"keras_dist: rank 0 of 2 has waited \d+ s for rank 1 in .* \(in fit, epoch 2\)\."
    assert any(re.fullmatch(waited, line) for line in lines), ended.stdout
    there = re.compile(r"Rank 1 \(pid \d+ on .*\), in evaluate within fit, epoch 2:")
    assert any(there.fullmatch(line) for line in lines), ended.stdout
    assert ", in on_test_begin" in ended.stdout
    assert "Received: the end of the script. Rank 0 is in fit, rank 1 after fit. " in ended.stdout


@pytest.mark.fault(
    "two ranks of a process set make different calls while a third computes",
    "an error on both, and the job ends, exit code not 0",
    within=5,
)
def test_different_calls_on_a_process_set_while_another_rank_computes(job):
    text = """
import time
from keras_dist import ops
runtime.init()
two = runtime.add_process_set([0, 1])
if runtime.rank() == 2:
    time.sleep(60)
fault()
ops.allreduce([0.0] * (3 + runtime.rank()), process_set=two)
"""
    ended = job(3, text, bare=True)
    assert ended.returncode != 0
    for rank in (0, 1):
        assert f"[{rank}] keras_dist.errors.MismatchError" in ended.stdout


@pytest.mark.fault(
    "a rank calls two concurrent operations with the same name",
    "an error on this rank and on ranks that wait for the second; the job can continue",
    within=5,
)
def test_two_operations_of_one_name(job):
    text = """
import threading
from keras_dist.ops import asynchronous
from keras_dist import ops, errors
runtime.init()
gate = threading.Event()
if runtime.rank() == 1:
    runtime.communicator().order.queue(gate.wait, "what takes long")
fault()
first = asynchronous.allreduce_async(1.0, "sum", "loss")
if runtime.rank() == 0:
    first.wait()
try:
    asynchronous.allreduce_async(2.0, "sum", "loss").wait()
except errors.ArgumentError as error:
    print(f"{runtime.rank()}: {error}\\n", end="", flush=True)
gate.set()
found = float(first.wait()), float(ops.allreduce(3.0, "sum", "loss"))
print(f"{runtime.rank()}: {found}\\n", end="", flush=True)
"""
    ended = job(2, text, bare=True)
    assert ended.returncode == 0, ended.stdout
    for rank in range(2):
        output = [line for line in ended.stdout.splitlines() if line.startswith(f"{rank}: ")]
        assert "[rank 1 of 2] Expected one operation named 'loss' at a time" in output[0], output
        assert output[1] == f"{rank}: (2.0, 6.0)"


FACES = {
    "tensorflow": ("tensorflow as tf", "tf.ones(3)", "tf.function(reduce)()"),
    "torch": ("torch", "torch.ones(3)", "hvd.synchronize(hvd.allreduce_async(given(), name='a'))"),
    "jax": ("jax", "jax.numpy.ones(3)", "jax.jit(reduce)().block_until_ready()"),
}


@pytest.mark.fault(
    "a rank passes an invalid value, and all ranks catch the error",
    "an error on every rank; the next call succeeds",
    within=20,
)
@pytest.mark.parametrize("face", FACES)
def test_an_invalid_argument_on_one_rank(job, face):
    framework, tensor, queued = FACES[face]
    text = f"""
import keras_dist, {framework}, keras_dist.{face} as hvd
hvd.init()
wrong = None
def given():
    return object() if wrong == "value" else {tensor}
def kind():
    return "median" if wrong == "kind" else "sum"
def reduce():
    return hvd.allreduce(given(), op=kind())
calls = [
    reduce,
    lambda: hvd.allgather(given()),
    lambda: hvd.broadcast(given(), 0),
    lambda: hvd.grouped_allreduce(3 if wrong else [given()]),
    lambda: keras_dist.allreduce(1.0, name=[] if wrong else None),
    lambda: {queued},
]
fault()
for rank in range(2):
    for call in calls:
        for kind_of_fault in ("value", "kind"):
            wrong = kind_of_fault if hvd.rank() == rank else None
            failed = False
            try:
                call()
            except Exception:
                failed = True
            place = calls.index(call), kind_of_fault, failed
            assert keras_dist.allgather_object(place) == [place] * 2
print("in step", hvd.allreduce({tensor}, op=hvd.Sum), flush=True)
"""
    ended = job(2, text, KERAS_BACKEND=face)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("in step") == 2


VERSIONS = """
import sys, time
from mpi4py import MPI
import numpy
from keras_dist.runtime import host_check
rank, seconds = MPI.COMM_WORLD.rank, time.time()
fault()
if rank == 1:
    CHANGE
runtime.init()
print(f"rank {rank} has joined", flush=True)
"""
CHANGES = {
    "numpy": ("numpy.__version__ = '1.0'", "numpy 1.0"),
    "keras_dist": ("host_check.__version__ = '0.1'", "keras_dist 0.1"),
    "keras_dist with other settings": (
        "from keras_dist.runtime import startup; host_check.__version__ = '0.1'; "
        "startup.ALIKE = ('threads', *startup.ALIKE)",
        "keras_dist 0.1",
    ),
    "Python": ("sys.version_info = type('Version', (), dict(major=3, minor=9))", "Python 3.9"),
    "MPI": ("host_check._engine.library.version = lambda mpi: 'MPICH 1.0'", "MPI MPICH 1.0"),
}


@pytest.mark.fault("a host has another version of keras_dist, Python, MPI or numpy", ENDS, within=5)
@pytest.mark.parametrize("case", CHANGES)
def test_another_version(job, case):
    change, received = CHANGES[case]
    name = case.split()[0]
    ended = job(2, VERSIONS.replace("CHANGE", change), bare=True)
    found = re.findall(
        rf"\[rank 1 of 2\] Expected {name} [^,]+ as on rank 0 \(on \S+\)\. "
        rf"Received: {re.escape(received)} \(on \S+\)\. Install the same versions",
        ended.stdout,
    )
    assert ended.returncode != 0
    assert len(found) >= 2, ended.stdout


@pytest.mark.fault(
    "the clock of a host is minutes apart",
    "a warning that names the host; the job continues",
    within=5,
)
def test_another_clock(job):
    change = "real = time.time; time.time = lambda: real() + 300"
    ended = job(2, VERSIONS.replace("CHANGE", change), bare=True)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("has joined") == 2
    message = (
        r"Expected clocks of all hosts within 60 s of that of \S+\. Received: \+\d+ s on \S+\. "
    )
    assert len(re.findall(message, ended.stdout)) == 1, ended.stdout
