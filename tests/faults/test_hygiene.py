"""Forks, threads and interpreter shutdown: nothing hangs, and no child acts as a rank."""

import os

import pytest
from jobs import BARE

FINE = "print('fine', flush=True)\n"
NO_RANK = "an error in the child says that it is not a rank; the job continues and succeeds"


def assert_fine(ended, ranks):
    """Checks that all ranks finished their scripts and the job succeeded."""
    assert (ended.returncode, ended.stdout.count("fine")) == (0, ranks), ended.stdout


FORKED = f"""
import multiprocessing
from keras_dist import ops, errors
def use(queue):
    try:
        queue.put(str(runtime.rank()))
    except errors.LaunchError as error:
        queue.put(str(error))
runtime.init()
ops.barrier()
fault()
# os.fork: a child that uses us, one that raises, one that leaves, one that ends like a rank.
for code, act in [(1, "runtime.rank()"), (1, "1 / 0"), (3, "raise SystemExit(3)"), (0, "pass")]:
    if (pid := os.fork()) == 0:
        exec(act)
        raise SystemExit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, act
# multiprocessing, as a DataLoader has it.
context = multiprocessing.get_context("fork")
queue = context.Queue()
workers = [context.Process(target=use, args=(queue,)) for _ in range(2)]
for worker in workers:
    worker.start()
for worker in workers:
    assert "before the end of its script. Received: process" in queue.get()
    worker.join()
    assert worker.exitcode == 0
assert ops.allreduce(1.0, op="sum") == runtime.size()
{FINE}
"""


@pytest.mark.fault(
    "a fork after `init` whose child uses keras_dist, raises or exits", NO_RANK, within=5
)
def test_a_forked_child_is_no_rank(job):
    ended = job(2, FORKED, bare=True)
    assert_fine(ended, 2)
    assert "errors.LaunchError: [keras_dist] Expected the process that has called" in ended.stdout


@pytest.mark.fault("a fork after `init`, under Open MPI", NO_RANK, within=15)
def test_a_forked_child_is_no_rank_under_open_mpi(job, open_mpi):
    assert_fine(job(2, FORKED, bare=True, python=open_mpi), 2)


@pytest.mark.fault(
    "a script without `__main__` guard runs again in a spawned child", NO_RANK, within=20
)
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_a_spawned_child_is_no_rank(job, tmp_path, way):
    script = tmp_path / "script.py"
    script.write_text(f"""
import multiprocessing
from jobs import BARE
exec(BARE)
from keras_dist import ops
runtime.init()
if __name__ == "__main__":
    child = multiprocessing.get_context("{way}").Process(target=print)
    try:
        child.start()
        child.join()
        assert child.exitcode == 1
    except (EOFError, ConnectionError):  # the server of forks has ended
        pass
    ops.barrier()
    {FINE}
""")
    # A file, because a script passed by -c is not run again.
    text = f"import runpy, sys\nsys.path.insert(0, {str(tmp_path)!r})\nfault()\n"
    text += f"os.execv(sys.executable, [sys.executable, {str(script)!r}])"
    path = f"{os.path.dirname(__file__)}/..{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ended = job(2, text, PYTHONPATH=path)
    assert_fine(ended, 2)
    assert "Received: a child of it started by multiprocessing" in ended.stdout


@pytest.mark.fault(
    "several Python threads call collectives at once",
    "they run in sequence, with correct results",
    within=20,
)
def test_threads_stand_in_line(job):
    text = f"""
import threading
import numpy as np
from keras_dist import ops
runtime.init()
fault()
wrong = []
def work():
    for _ in range(100):
        total = ops.allreduce(np.full(1000, 1.0 + runtime.rank()), op="sum")
        if (total != 3).any():
            wrong.append(total)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong
{FINE}
"""
    assert_fine(job(2, text, bare=True), 2)


@pytest.mark.fault(
    "several `init` and `shutdown`, with the end of the script in any of these states",
    "the job succeeds",
    within=20,
)
@pytest.mark.parametrize("last", ["init", "shutdown"])
def test_init_and_shutdown_in_turn(job, last):
    text = f"""
from keras_dist import ops
fault()
for _ in range(3):
    runtime.init()
    runtime.init()
    assert ops.allreduce(1.0, op="sum") == runtime.size()
    runtime.shutdown()
    runtime.shutdown()
runtime.{last}()
{FINE}
"""
    assert_fine(job(2, text, bare=True), 2)


@pytest.mark.fault(
    "handlers of `atexit` that use keras_dist, from before and after its import",
    "the later one works, the earlier one gets an error that the ranks have left; no hang",
    within=5,
)
@pytest.mark.parametrize("loads", ["", "from mpi4py import MPI"])
def test_the_order_of_handlers_at_exit(job, loads):
    text = f"""
import atexit, sys
def early():
    print("early", ops.allreduce(1.0, op="sum"))
def late():
    print(f"late {{ops.allreduce(1.0, op='sum')}}\\n", end="", flush=True)
atexit.register(early)
{loads}
{BARE}
from keras_dist import ops
runtime.init()
atexit.register(late)
fault()
{FINE}
"""
    ended = job(2, text)
    assert_fine(ended, 2)
    assert ended.stdout.count("late 2.0") == 2
    assert "early 2.0" not in ended.stdout
    assert ended.stdout.count("from an atexit handler, after the job has ended") == 2


@pytest.mark.fault(
    "the user's script raises in a handler of `atexit`",
    "as in one process: a traceback, and the exit code is unchanged; no hang",
    within=5,
)
@pytest.mark.fault(
    "the modules of keras_dist are removed before the interpreter ends", "no hang", within=5
)
def test_an_end_without_modules(job):
    text = f"""
import atexit, sys
runtime.init()
def raise_error():
    raise ValueError("broken on purpose")
atexit.register(raise_error)
for name in [name for name in sys.modules if name.startswith("keras_dist")]:
    del sys.modules[name]
fault()
{FINE}
"""
    ended = job(2, text, bare=True)
    assert_fine(ended, 2)
    assert ended.stdout.count("ValueError: broken on purpose") == 2


@pytest.mark.fault(
    "ranks wait for a rank that computes for a long time",
    "they use less than 30 % of a core, in a collective and at the end of the script",
    within=20,
)
@pytest.mark.parametrize("way", ["copy", "mpi"])
def test_waiting_ranks_leave_their_cores(job, way):
    text = """
import atexit
from keras_dist import ops
runtime.init()
began = time.process_time()
if runtime.rank() == 1:
    fault()
    time.sleep(2)
ops.barrier()
middle = time.process_time()
assert middle - began < 0.6, middle - began
if runtime.rank() == 1:
    time.sleep(2)
else:
    def check():
        used = time.process_time() - middle
        print("fine" if used < 0.6 else used, flush=True)
    atexit._clear()
    atexit.register(check)
    from keras_dist.runtime import exit_hooks
    atexit.register(exit_hooks._finalize, os.getpid())
"""
    ended = job(2, text, bare=True, KERAS_DIST_REDUCE=way)
    assert_fine(ended, 1)
