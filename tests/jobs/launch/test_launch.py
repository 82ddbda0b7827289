"""Start and end of jobs: real processes, exit codes, messages and times."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import start_jobs
from start_jobs import allowed, lean_variables, script, without_launcher

pytestmark = pytest.mark.short

MPICH = Path(sys.executable).parent

WITHOUT_BACKEND = lean_variables(KERAS_BACKEND="torch")
WITHOUT_BACKEND["LEFT_OUT"] += " torch"
WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}


def run(command, environment=None):
    """Runs a command without the variables of a launcher around the tests."""
    return start_jobs.run(command, env=without_launcher(**(environment or {})))


# --- A launcher and an MPI library that do not match


def test_mpirun_of_open_mpi_with_the_library_of_mpich(open_mpi):
    start = time.monotonic()
    mpiexec = [open_mpi.with_name("mpiexec"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    job = run([*mpiexec, *script("runtime.init()")])
    assert job.returncode != 0
    assert time.monotonic() - start < allowed(20)
    assert job.stdout.count("LaunchError: [keras_dist.init] Expected 2 ranks or more") == 2
    assert "as announced by Open MPI's mpirun (OMPI_COMM_WORLD_SIZE)" in job.stdout
    assert "Received: MPICH Version" in job.stdout
    assert "Fatal error" not in job.stdout
    assert f"it may be {MPICH / 'mpiexec'}" in job.stdout


def test_mpiexec_of_mpich_with_the_library_of_open_mpi(open_mpi):
    job = run([MPICH / "mpiexec", "-n", "2", open_mpi, *script("runtime.init()")[1:]])
    assert job.returncode != 0
    # The first rank ends the job, possibly before the other has printed its error.
    assert "LaunchError: [keras_dist.init] Expected 2 ranks or more" in job.stdout
    assert "(PMI_SIZE)" in job.stdout
    assert "Received: 1 process, according to Open MPI" in job.stdout
    assert f"it may be {open_mpi.with_name('mpiexec')}" in job.stdout


def test_one_rank_with_another_library_ends_the_job(open_mpi):
    start = time.monotonic()
    ours = script("runtime.init()")
    job = run([MPICH / "mpiexec", "-n", "1", *ours, ":", "-n", "1", open_mpi, *ours[1:]])
    assert job.returncode != 0
    assert time.monotonic() - start < allowed(20)  # the other one waits in MPI_Init
    assert "Received: 1 process, according to Open MPI" in job.stdout
    assert f"on {os.uname().nodename}. " in job.stdout


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMIX_RANK": "3", **WITHOUT_MPI},  # MPICH itself fails if PMIx does not answer
        {"SLURM_NTASKS": "4"},
    ],
    ids=str,
)
def test_a_launcher_that_speaks_of_more_ranks_is_not_ignored(variables):
    job = run(script("runtime.init()"), variables)
    assert job.returncode == 1
    name = next(iter(variables))
    assert f"Expected 4 ranks or more, as announced by {launcher_of(name)} ({name})" in job.stdout


def launcher_of(variable):
    return {"OMPI": "Open MPI's mpirun", "PMIX": "a PMIx launcher", "SLUR": "Slurm"}[variable[:4]]


def test_one_process_on_purpose():
    announced = dict.fromkeys(["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"], "4")
    variables = {**announced, "KERAS_DIST_SINGLE_PROCESS": "1"}
    job = run(script("print('size', runtime.size())"), variables)
    assert (job.returncode, job.stdout) == (0, "size 1\n")


# --- An MPI library that cannot start


def test_mpi_that_is_finalized():
    job = run(script("from mpi4py import MPI\nMPI.Finalize()\nruntime.init()"))
    assert job.returncode == 1
    assert "LaunchError: [keras_dist.init] Expected MPI that is not finalized" in job.stdout
    assert "Call keras_dist.init before" in job.stdout


# /sys stands in for a /dev without shm.
@pytest.mark.parametrize(
    "room", ["mount -t tmpfs -o size=1m tmpfs /dev/shm", "mount --bind /sys /dev"]
)
def test_ranks_of_mpich_without_shared_memory(room):
    """MPICH would end the ranks by SIGBUS, without a word, or with a stack of its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("NOT TESTED: a small /dev/shm, which needs unshare")
    ours = [str(MPICH / "mpiexec"), "-n", "2", *script("runtime.init()")]
    job = run(["unshare", "-m", "sh", "-c", f'{room} && exec "$@" 2>&1', "sh", *ours])
    assert job.returncode != 0
    assert "Expected 2 MiB of shared memory, which MPICH needs for 2 ranks of a node" in job.stdout
    assert "--shm-size=1g" in job.stdout
    assert "signal" not in job.stdout


def test_keras_without_its_backend():
    job = run([sys.executable, "-c", "import keras_dist\nkeras_dist.init()"], WITHOUT_BACKEND)
    assert job.returncode == 1
    assert "LaunchError: [keras_dist] Expected Keras to find its backend, torch" in job.stdout
    assert "Received: no module 'torch'. Set KERAS_BACKEND to a backend" in job.stdout


# --- No MPI library at all


def test_one_process_without_mpi_says_so_once():
    text = """
from keras_dist.ops import asynchronous
from keras_dist import ops
for _ in range(3):
    assert runtime.size() == 1 and runtime.local_size() == 1
assert ops.allreduce([1.0, 2.0]).tolist() == [1.0, 2.0]
assert ops.allgather_object("x") == ["x"]
assert ops.broadcast_object("x") == "x"
assert ops.allgather([[1], [2]]).tolist() == [[1], [2]]
ops.barrier()
assert asynchronous.synchronize(asynchronous.allreduce_async(3.0)) == 3
runtime.shutdown()
"""
    job = run(script(text), WITHOUT_MPI)
    assert job.returncode == 0, job.stdout
    assert job.stdout.count("keras_dist runs as one process: no MPI library was found") == 1
    assert "pip install 'keras_dist[mpich]'" in job.stdout
    assert len(job.stdout.splitlines()) == 1


def test_several_ranks_without_mpi_are_refused():
    variables = {"PMI_SIZE": "2", **WITHOUT_MPI}
    job = run(script("runtime.init()"), variables)
    assert job.returncode == 1
    assert "Expected 2 ranks or more" in job.stdout
    assert "Received: no MPI library" in job.stdout


# --- Ranks that succeed


@pytest.mark.parametrize("way", ["copy", "mpi"])
def test_ranks_with_process_sets_and_other_threads_end_well(run_ranks, way):
    text = """
import os, time
from keras_dist.runtime.process_sets import ProcessSet
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.environ["KERAS_DIST_THREADS"] = "1"
runtime.init(process_sets=[ProcessSet([0, 1]), ProcessSet([1, 2])])
time.sleep(runtime.rank() * 0.3)
"""
    job = run_ranks(3, *script(text)[1:], env={**os.environ, "KERAS_DIST_REDUCE": way})
    assert (job.returncode, job.stdout) == (0, "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_after_all_ranks_have_ended_keeps_their_exit_code(name):
    """As from srun --kill-on-bad-exit, which ends the others when the first rank has exited."""
    text = f"""
import atexit, signal, sys
atexit.register(lambda: signal.raise_signal(signal.{name}))  # runs after those of keras_dist
runtime.init()
sys.exit(75)
"""
    job = run(script(text))
    assert job.returncode == 75, job.stdout


def test_sets_and_queues_where_mpi_takes_one_thread_at_a_time(run_ranks):
    text = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
import numpy as np
from keras_dist import ProcessSet, ops
from keras_dist.ops import asynchronous
pair = ProcessSet([0, 1])
runtime.init(process_sets=[pair])
rank = runtime.rank()
assert runtime.communicator().mpi.Query_thread() < runtime.communicator().mpi.THREAD_MULTIPLE
for turn in range(20):
    on_pair = rank < 2 and asynchronous.allreduce_async(
        np.full(50_000, turn + rank), op="sum", process_set=pair
    )
    of_all = asynchronous.allreduce_async(np.full(9, rank), op="sum")
    assert ops.allreduce(float(turn), op="sum") == 3 * turn
    assert (of_all.wait() == 3).all()
    assert not on_pair or (on_pair.wait() == 2 * turn + 1).all()
"""
    for way in ("copy", "mpi"):
        job = run_ranks(3, *script(text)[1:], env={**os.environ, "KERAS_DIST_REDUCE": way})
        assert (job.returncode, job.stdout) == (0, "")


# --- Queued operations


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_nobody_waits_for_runs_before_the_end(run_ranks, ranks):
    text = """
import sys, time
from keras_dist.ops import asynchronous
class Value:
    def __array__(self, dtype=None, copy=None):
        import numpy
        time.sleep(0.1 * runtime.rank())
        sys.stderr.write("read\\n")
        return numpy.ones(3)
handles = [asynchronous.allreduce_async(Value()) for _ in range(3)]
handles.append(asynchronous.allreduce_async(1.0, "mean", name="loss"))
asynchronous.allreduce_async("text", name="words")
"""
    job = run_ranks(ranks, *script(text)[1:])
    assert job.returncode == 0, job.stdout
    assert job.stdout.count("read") == 3 * ranks
    assert job.stdout.count("A queued allreduce that nobody waited for failed") == 2 * ranks
    for rank in range(ranks):
        assert f"[rank {rank} of {ranks}] Expected op to be one of average" in job.stdout
        assert f"[rank {rank} of {ranks}] Expected words to have a dtype" in job.stdout


# --- The command line


def test_the_command_line_needs_no_framework():
    program = "import sys; from keras_dist.launch.cli import main; sys.argv[1:] = ['--help']\n"
    heavy = "keras tensorflow numpy mpi4py yaml rich IPython".split()
    check = f"try: main()\nexcept SystemExit: sys.exit(any(m in sys.modules for m in {heavy}))"
    job = run([sys.executable, "-c", program + check])
    assert job.returncode == 0, job.stdout


def test_importing_keras_dist_torch_does_not_import_the_compiler_of_torch():
    check = "import sys, keras_dist.torch; sys.exit('torch._dynamo' in sys.modules)"
    assert run([sys.executable, "-c", check]).returncode == 0


def test_every_public_name_can_be_imported():
    text = """
import keras_dist
for name in keras_dist.__all__:
    assert getattr(keras_dist, name) is not None, name
assert set(dir(keras_dist)) == set(keras_dist.__all__)
try:
    keras_dist.nothing
except AttributeError as error:
    assert "attribute nothing" in str(error)
"""
    # JAX starts fastest.
    job = run([sys.executable, "-c", text], lean_variables(KERAS_BACKEND="jax"))
    assert job.returncode == 0, job.stdout
