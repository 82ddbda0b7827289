"""Training continues with the remaining ranks: Open MPI 5 with ULFM."""

import pytest

ULFM = ("--with-ft", "ulfm")
GO_ON = {"KERAS_DIST_ON_FAILURE": "continue"}
BEGIN = """
import signal
import numpy as np
from keras_dist import ops
runtime.init()
me = runtime.rank()
def die():
    fault()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def go_on(job, open_mpi):
    """A function that runs a bare script on n ranks that continue after a rank dies; see `job`."""

    def run(ranks, text, **variables):
        environment = {**GO_ON, **variables}
        return job(ranks, BEGIN + text, bare=True, python=open_mpi, options=ULFM, **environment)

    return run


# Each rank contributes a power of two, so a sum shows which ranks contributed.
STEPS = """
kills = {1: 4, 2: 9}
sums = []
for step in range(14):
    if kills.get(me) == step:
        die()
    total = ops.allreduce(np.full(50_000, 2.0**me), op="sum", name="gradients")
    assert (total == total[0]).all()
    sums.append(int(total[0]))
    if step == 11:
        ops.join()
assert len(set(map(tuple, ops.allgather_object(sums)))) == 1
assert ops.broadcast([me], root_rank=0).tolist() == [0]
if runtime.rank() == 0:
    print("sums", sums)
"""


@pytest.mark.parametrize("way", ["copy", "mpi"])
@pytest.mark.fault(
    "two of four ranks are killed, one after the other, with `on_failure=continue`",
    "each step is reduced over the remaining ranks, and none is lost; equal results, exit code 0",
    within=20,
)
def test_two_of_four_die(go_on, way):
    ended = go_on(4, STEPS, KERAS_DIST_REDUCE=way)
    assert ended.returncode == 0, ended.stdout
    assert f"sums {[15] * 4 + [13] * 5 + [9] * 5}" in ended.stdout
    assert "keras_dist: rank 1 has died. 3 of 4 ranks continue" in ended.stdout
    assert "keras_dist: rank 1 has died. 2 of 3 ranks continue" in ended.stdout


# One rank keeps all results from step 1 on, until it holds all rows of shared memory but one, and
# results are copied. Another dies at a rendezvous from step 3 on.
KEEPS = """
from keras_dist import _engine
from keras_dist._engine.mpi.digests import DigestExchange
comm = runtime.communicator()
specs = [((50_000,), np.dtype("f4"))] * 2
options = _engine.OpOptions(_engine.ReduceOp.SUM)
plan = _engine.PlanOptions(1, lend=True)
lent = _engine.FusedAllreduce(comm, ["a", "b"], specs, options, plan)
met = DigestExchange.compare
meetings, kept = [], []
def compare(self, digest, payload=None):
    if len(meetings) == moment:
        die()
    meetings.append(digest)
    return met(self, digest, payload)
for step in range(9):
    if me == 3 and step == 3:
        DigestExchange.compare = compare
    results = lent([np.full(50_000, step + 2.0**me, np.float32)] * 2)
    for result in results:
        assert (result == result[0]).all() and result[0] in (4 * step + 15, 3 * step + 7), step
    if me == 1 and step:
        kept.append((results[0], results[0].copy()))
    del results, result
for result, before in kept:
    assert (result == before).all()
assert comm.size == 3
"""


@pytest.mark.parametrize("moment", [0, 2, 5])
@pytest.mark.fault(
    "a rank is killed while another keeps a shared result, with `on_failure=continue`",
    "the result is unchanged; the remaining ranks continue",
    within=20,
)
def test_a_rank_dies_while_another_keeps_what_it_was_lent(go_on, moment):
    ended = go_on(4, f"moment = {moment}" + KEEPS)
    assert ended.returncode == 0, ended.stdout
    assert "keras_dist: rank 3 has died. 3 of 4 ranks continue" in ended.stdout


def test_what_a_script_writes_is_not_what_others_catch_up_with(go_on):
    text = """
from keras_dist import _engine
comm = runtime.communicator()
specs = [((50_000,), np.dtype("f4"))]
for factor in (1.0, 0.5):
    options = _engine.OpOptions(_engine.ReduceOp.SUM, postscale=factor)
    plan = _engine.PlanOptions(1, lend=True)
    lent = _engine.FusedAllreduce(comm, ["a"], specs, options, plan)
    for step in range(7):
        [result] = lent([np.full(50_000, step, np.float32)])
        result[:] = -1
        [kept] = comm.faults.retry._last.unwrap()
        assert (kept == 2 * step * factor).all()
"""
    ended = go_on(2, text)
    assert ended.returncode == 0, ended.stdout


def test_a_wrong_argument_is_one_operation_on_all_ranks(go_on):
    text = """
from keras_dist import errors
for name in (None, "loss"):
    try:
        ops.allreduce(1.0, "median" if me == 0 else "sum", name)
        raise SystemExit("no error")
    except errors.ArgumentError:
        pass
    assert ops.allreduce(1.0, "sum") == 2
"""
    ended = go_on(2, text)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault(
    "the root is killed while others wait for its broadcast, with `on_failure=continue`",
    "the next rank becomes the root and sends its value",
    within=15,
)
def test_the_root_dies_in_a_broadcast(go_on):
    text = """
if me == 0:
    die()
assert ops.broadcast_object(f"from {me}") == "from 1"
assert (runtime.rank(), runtime.size()) == (me - 1, 2)
"""
    ended = go_on(3, text)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault(
    "a rank is killed while another has joined without data, with `on_failure=continue`",
    "the remaining ranks reduce and join as before",
    within=15,
)
def test_a_rank_dies_while_another_has_joined(go_on):
    text = """
if me != 1:
    for step in range(3):
        if me == 2 and step == 1:
            die()
        total = ops.allreduce(2.0**me, op="sum")
        assert total == [9 + 4, 9, 9][step], total
ops.join()
assert ops.allreduce(2.0**me, op="sum") == 11
"""
    ended = go_on(4, text)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault(
    "a rank is killed during the last reduction, which two other ranks have completed and one has "
    "not, with `on_failure=continue`",
    "the one receives the result from the two; equal results",
    within=15,
)
def test_a_rank_dies_when_it_has_been_waited_for(go_on):
    text = """
from keras_dist import _engine
from keras_dist._engine.shm import segments
comm = runtime.communicator()
specs = [((1000,), np.dtype("float64"))]
options = _engine.PlanOptions(2**20, counts_updates=True)
plan = _engine.FusedAllreduce(comm, ["g"], specs, _engine.OpOptions(_engine.ReduceOp.SUM), options)
for step in range(3):
    plan([np.full(1000, 2.0**me)])
ops.barrier()
if me == 3:
    come = segments.Counter.raise_to
    def come_and_die(*args):
        come(*args)
        die()
    segments.Counter.raise_to = come_and_die
if me in (0, 2):
    time.sleep(1.5)
total = plan([np.full(1000, 2.0**me)])[0]
ops.join()
assert (total == 15).all(), total
"""
    ended = go_on(4, text)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault(
    "a rank is killed while shared memory is created, with `on_failure=continue`",
    "the remaining ranks continue; no file is left in `/dev/shm`",
    within=15,
)
def test_a_rank_dies_while_memory_is_made(go_on):
    text = """
from keras_dist._engine.shm import segments
if me == 1:
    segments.Segment.__init__ = lambda *args: die()
total = ops.allreduce(np.full(100_000, 2.0**me), op="sum")
assert (total == 5).all()
made = [name for name in os.listdir("/dev/shm") if name.startswith(f"keras_dist-{os.getuid()}-")]
assert not [name for name in made if name.split("-")[2] == str(os.getpid())]
"""
    ended = go_on(3, text)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        pytest.param(
            "continue",
            0,
            marks=pytest.mark.fault(
                "a rank is killed while others are at the end of the script, with "
                "`on_failure=continue`",
                "the remaining ranks end with exit code 0",
                within=15,
            ),
        ),
        pytest.param(
            "stop",
            1,
            marks=pytest.mark.fault(
                "the same without it, with an MPI library that supports it",
                "the job ends with the reason, exit code not 0",
                within=15,
            ),
        ),
    ],
)
def test_a_rank_dies_when_others_are_at_the_end(go_on, wish, code):
    text = "if me == 1:\n    time.sleep(1)\n    die()\n"
    ended = go_on(3, text, KERAS_DIST_ON_FAILURE=wish)
    assert (ended.returncode != 0) == bool(code), ended.stdout
    assert "rank 1 has died" in ended.stdout
    assert "Exception ignored" not in ended.stdout


@pytest.mark.fault(
    "a rank is killed in a job with process sets, with `on_failure=continue`",
    "the job ends; the error says that process sets are not supported",
    within=15,
)
def test_process_sets_cannot_go_on(go_on):
    text = """
runtime.add_process_set([0, 1])
if me == 2:
    die()
ops.barrier()
"""
    ended = go_on(3, text)
    assert ended.returncode != 0
    assert "Expected no process sets where the job continues" in ended.stdout


@pytest.mark.fault(
    "only one rank requests `on_failure=continue`",
    "an error on every rank that names both calls",
    within=10,
)
@pytest.mark.parametrize("ready", [0, 1])
def test_one_rank_alone_is_ready_for_deaths(go_on, ready):
    text = f"""
fault()
if me == {ready}:
    runtime.survive_rank_loss()
ops.allgather_object(me)
"""
    ended = go_on(2, text, KERAS_DIST_ON_FAILURE="stop", KERAS_DIST_STALL_ABORT_SECONDS="8")
    assert ended.returncode != 0
    assert "on_failure=continue" in ended.stdout
    assert "Received: " in ended.stdout
    assert "The job ends now" not in ended.stdout


@pytest.mark.fault(
    "a rank is killed and another does not take part in the recovery, with `on_failure=continue`",
    "at the limit (here 4) the job ends",
    within=15,
)
def test_another_does_not_come_to_go_on(go_on):
    text = """
ops.barrier()
if me == 1:
    die()
if me == 2:
    time.sleep(1000)
ops.barrier()
"""
    limits = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "4"}
    ended = go_on(3, text, **limits)
    assert ended.returncode != 0
    assert "[rank 0 of 3] has waited" in ended.stdout
    assert "a rank has died and the others have not recovered yet" in ended.stdout
    assert "The job ends now: the limit is 4 s" in ended.stdout


@pytest.mark.fault(
    "a rank raises, with `on_failure=continue`",
    "its error ends the job: errors of the script are not continued",
    within=10,
)
def test_an_error_is_no_death(go_on):
    text = """
if me == 1:
    fault()
    raise ValueError("broken on purpose")
ops.barrier()
"""
    ended = go_on(3, text)
    assert ended.returncode != 0
    assert "[1] ValueError: broken on purpose" in ended.stdout


@pytest.mark.fault(
    "a rank is killed with `on_failure=continue`, which the MPI library does not support",
    "a warning with the remedy at the start; then the job ends",
    within=5,
)
def test_mpi_that_cannot_go_on_is_said_at_the_start(job):
    text = """
if me == 1:
    time.sleep(1)
    die()
ops.barrier()
"""
    ended = job(2, BEGIN + text, bare=True, **GO_ON)
    assert ended.returncode != 0
    assert "cannot continue without a rank that dies: only Open MPI 5 or newer can" in ended.stdout
    assert "keras-dist run --max-restarts" in ended.stdout


FIT = """
import signal
import keras, numpy as np, keras_dist
keras_dist.init()
me = keras_dist.rank()
x = np.random.default_rng(0).standard_normal((96, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
train = keras_dist.data.shard((x, y), batch_size=8)
test = keras_dist.data.shard((x, y), batch_size=8, shuffle=False)
def die():
    fault()
    os.kill(os.getpid(), signal.SIGKILL)
samples = []
class Dying(keras.callbacks.Callback):
    def set_model(self, model):
        super().set_model(model)
        if (me, KILLS) == (1, "broadcast, checkpoint"):
            die()
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if epoch == 3:
            samples.append(sum(len(batch[0]) for batch in train))
    def on_train_batch_begin(self, batch, logs=None):
        if (me, KILLS, self.epoch, batch) == (0, "batch, validation", 1, 2):
            die()
    def on_test_batch_begin(self, batch, logs=None):
        if (me, KILLS, self.epoch, batch) == (2, "batch, validation", 1, 1):
            die()
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
save = model.save
def dying_save(*args, **kwargs):
    if (me, KILLS, os.path.exists("saved.keras")) == (0, "broadcast, checkpoint", True):
        die()
    save(*args, **kwargs)
model.save = dying_save
options = dict(checkpoint="saved.keras", on_failure="continue")
log = keras_dist.callbacks.RootOnly(keras.callbacks.CSVLogger("log.csv"))
callbacks = keras_dist.callbacks(Dying(), log, **options)
history = model.fit(train, validation_data=test, epochs=4, verbose=2, callbacks=callbacks)
keras_dist.verify_replicas(model)
told = keras_dist.allgather_object((history.history, samples[-1]))
if keras_dist.rank() == 0:
    assert all(history == told[0][0] for history, _ in told)
    assert history.history["loss"][-1] < history.history["loss"][0]
    print("ended", keras_dist.size(), sum(count for _, count in told))
    keras.saving.load_model("saved.keras")
    with open("log.csv") as file:
        assert [line[:2] for line in file] == ["ep", "0,", "1,", "2,", "3,"]
"""

CONTINUES = (
    "training continues, and all data is distributed over the remaining ranks; equal weights"
)
PLACES = {
    "broadcast": "a rank is killed during the broadcast",
    "checkpoint": "the root is killed during the write of a checkpoint",
    "batch": "the root is killed during an epoch",
    "validation": "a rank is killed during validation",
}


def case(backend, *places, marks=()):
    texts = [f"{PLACES[place]} of `fit`, with `on_failure=continue`" for place in places]
    rows = [pytest.mark.fault(text, CONTINUES, within=60) for text in texts]
    return pytest.param(backend, ", ".join(places), marks=[*rows, *marks])


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        case("jax", "broadcast", "checkpoint"),
        case("jax", "batch", "validation", marks=[pytest.mark.slow]),
        case("tensorflow", "batch", "validation", marks=[pytest.mark.slow]),
    ],
)
def test_fit_goes_on(job, open_mpi, tmp_path, backend, kills):
    text = f"KILLS = {kills!r}\nimport os\nos.chdir({str(tmp_path)!r})\n{FIT}"
    variables = {"timeout": 150, "KERAS_BACKEND": backend}
    ended = job(4, text, python=open_mpi, options=ULFM, **variables)
    assert ended.returncode == 0, ended.stdout
    assert "ended 2 96" in ended.stdout
    assert ended.stdout.count("Epoch 4/4") == 1
    died = [line for line in ended.stdout.splitlines() if "has died" in line]
    assert ["3 of 4 ranks continue" in died[0], "2 of 3 ranks continue" in died[1]] == [True, True]


AT_ONCE = """
import signal
import keras, numpy as np, keras_dist
keras_dist.init()
me = keras_dist.rank()
x = np.arange(96, dtype="float32")[:, None]
train = keras_dist.data.shard((x, x), batch_size=2)
seen = []
class Dying(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        seen.append([])
    def on_train_batch_begin(self, batch, logs=None):
        if (me, self.epoch, batch) in ((1, 1, 3), (0, 1, 6)):
            fault()
            os.kill(os.getpid(), signal.SIGKILL)
class Seeing(keras.Sequential):
    def call(self, x, **kwargs):
        seen[-1] += x[:, 0].tolist()
        return super().call(x, **kwargs)
model = Seeing([keras.layers.Dense(1)])
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(1e-9)), "mse")
callbacks = keras_dist.callbacks(Dying(), on_failure="continue", share_out="at once")
seen.append([])
model.fit(train, epochs=3, verbose=0, callbacks=callbacks)
epochs = [sum(told, []) for told in zip(*keras_dist.allgather_object(seen[-3:]))]
if keras_dist.rank() == 0:
    print("seen", [(len(epoch), len(set(epoch))) for epoch in epochs])
"""


# Of 96 samples, 2 a step on each of 4 ranks, one has learnt 6 when it dies, and 2 are left out. Of
# the 64 that 3 ranks share out, another has learnt 8 + 5 when it dies, and 3 are left out.
@pytest.mark.slow
@pytest.mark.fault(
    "two of four ranks are killed in an epoch of `fit`, with `share_out='at once'`",
    "the rest of the epoch is distributed over the remaining ranks, each sample once",
    within=30,
)
def test_the_rest_of_an_epoch_is_shared_out_at_once(job, open_mpi):
    ended = job(4, AT_ONCE, python=open_mpi, options=ULFM, timeout=150, KERAS_BACKEND="torch")
    assert ended.returncode == 0, ended.stdout
    assert "seen [(48, 48), (72, 72), (96, 96)]" in ended.stdout


@pytest.mark.fault(
    "the root is killed while a client watches the job, with `on_failure=continue`",
    "the next root serves the remaining ranks",
    within=15,
)
def test_the_next_root_is_watched(go_on, tmp_path):
    text = """
import contextlib
from keras_dist.monitor import sockets
def watch():
    found = []
    for path in sockets.find_sockets():
        with contextlib.suppress(OSError, StopIteration):  # of the dead, or of another job's end
            jobs = sockets.jobs_of(path)  # the first may be without the answers of slow ranks
            found.append(next(job for job in jobs if all(row.age is not None for row in job.rows)))
    return [job for job in found if job.pid == int(pids[0])]
pids = ops.allgather_object(os.getpid())
if me == 0:
    assert [row.report.pid for row in watch()[0].rows] == pids
    die()
pids = ops.allgather_object(os.getpid())
if me == 1:
    (job,) = watch()
    assert [row.report.pid for row in job.rows] == pids and all(row.age < 3 for row in job.rows)
ops.barrier()
"""
    ended = go_on(3, text, XDG_RUNTIME_DIR=str(tmp_path))
    assert ended.returncode == 0, ended.stdout
    assert not list((tmp_path / "keras_dist").iterdir())
