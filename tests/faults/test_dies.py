"""A rank dies without an error: all other ranks end, and nothing is left behind."""

import pytest
from test_raises import TRAINING

ENDS = "all ranks end, exit code not 0"


def dying(text):
    """A script in which rank 1 dies while the others wait for it in a loop."""
    return f"""
import ctypes, signal
from keras_dist import ops
runtime.init()
for turn in range(10**9):
    if runtime.rank() == 1 and turn == 20:
        fault()
        {text}
    ops.allreduce([1.0] * 100_000)
"""


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.fault("a rank is killed while others wait in shared memory", ENDS, within=5)
def test_a_killed_rank(job):
    assert job(3, dying(KILL), bare=True).returncode != 0


@pytest.mark.fault("a rank is killed while others wait in MPI", ENDS, within=5)
def test_a_killed_rank_where_data_goes_through_mpi(job):
    assert job(3, dying(KILL), bare=True, KERAS_DIST_REDUCE="mpi").returncode != 0


@pytest.mark.fault("the root is killed while others wait on another node", ENDS, within=5)
def test_a_killed_root(job):
    text = dying(KILL).replace("rank() == 1", "rank() == 0")
    assert job(4, text, bare=True, MPIR_CVAR_NUM_CLIQUES="2").returncode != 0


@pytest.mark.fault("a rank is killed, under Open MPI", ENDS, within=5)
@pytest.mark.parametrize("way", ["copy", "mpi"])
def test_a_killed_rank_under_open_mpi(job, open_mpi, way):
    ended = job(3, dying(KILL), bare=True, python=open_mpi, KERAS_DIST_REDUCE=way)
    assert ended.returncode != 0


@pytest.mark.fault("a rank is killed before `keras_dist.init()`", ENDS, within=5)
def test_a_rank_killed_before_init(job):
    text = f"""
import signal
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    fault()
    {KILL}
runtime.init()
"""
    assert job(2, text, bare=True).returncode != 0


@pytest.mark.fault("a rank is killed while it computes in `fit`", ENDS, within=5)
def test_a_rank_killed_in_fit(job):
    text = f"""
import signal, threading
{TRAINING}
def die():
    fault()
    {KILL}
class Test(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and rank == 1:
            threading.Timer(0.1, die).start()
fit(Test(), epochs=10**6)
"""
    assert job(2, text, KERAS_BACKEND="jax").returncode != 0


@pytest.mark.fault("all ranks are killed at once", ENDS, within=5)
def test_all_ranks_are_killed(job):
    text = dying(KILL).replace("runtime.rank() == 1 and ", "")
    assert job(2, text, bare=True).returncode != 0


@pytest.mark.fault("a rank has a segmentation fault", ENDS, within=5)
def test_a_segmentation_fault(job):
    assert job(3, dying("ctypes.string_at(0)"), bare=True).returncode != 0


@pytest.mark.fault("a rank aborts, as libraries in C do", ENDS, within=5)
def test_an_abort(job):
    assert job(3, dying("os.abort()"), bare=True).returncode != 0


@pytest.mark.fault(
    "a rank ends with `os._exit(0)` while others wait",
    "all ranks end; the exit code is 0 with MPICH, whose mpiexec returns that of the rank",
    within=5,
)
def test_a_rank_leaves_without_a_word(job):
    # The other ranks would reduce forever; only their end is checked.
    assert job(3, dying("os._exit(0)"), bare=True).seconds < 5


@pytest.mark.fault("a rank ends with `os._exit(0)`, under Open MPI", ENDS, within=5)
def test_a_rank_leaves_without_a_word_under_open_mpi(job, open_mpi):
    assert job(3, dying("os._exit(0)"), bare=True, python=open_mpi).returncode != 0


FIND_MPIEXEC = """
    pid = os.getppid()
    while open(f"/proc/{pid}/comm").read().strip() not in ("mpiexec", "mpiexec.hydra", "prterun"):
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
"""


def telling_mpiexec(name):
    """A script in which mpiexec gets a signal while the ranks communicate."""
    return f"""
import signal
from keras_dist import ops
runtime.init()
ops.barrier()
if runtime.rank() == 1:
    {FIND_MPIEXEC.strip()}
    fault()
    os.kill(pid, signal.{name})
while True:
    ops.barrier()
    time.sleep(0.01)
"""


@pytest.mark.fault("Ctrl-C to mpiexec", "KeyboardInterrupt on every rank; all end", within=5)
def test_an_interrupt_of_mpiexec(job):
    assert job(2, telling_mpiexec("SIGINT"), bare=True).returncode != 0


@pytest.mark.fault("mpiexec itself is killed", "all ranks end", within=10)
def test_a_killed_mpiexec(job):
    assert job(2, telling_mpiexec("SIGKILL"), bare=True).returncode != 0


@pytest.mark.fault(
    "mpiexec itself is killed, under Open MPI",
    "all ranks end, by the stall watchdog; files of Open MPI stay in /dev/shm",
    within=10,
)
def test_a_killed_mpiexec_under_open_mpi(job, open_mpi):
    periods = {"KERAS_DIST_STALL_SECONDS": "4"}  # it checks four times as often
    text = telling_mpiexec("SIGKILL")
    ended = job(2, text, bare=True, python=open_mpi, leaves="sm_segment", **periods)
    assert ended.returncode != 0
