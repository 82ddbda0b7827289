"""A rank raises: its traceback is printed once, with its rank, and all ranks end."""

import re

import pytest

ENDS = "the traceback once, marked with the rank; all ranks end, exit code not 0"


def assert_told_once(ended, rank, words):
    """Checks that the job failed, and that the text is in the traceback of one rank only."""
    assert ended.returncode != 0
    lines = [line for line in ended.stdout.splitlines() if words in line]
    last = [line for line in lines if re.match(r"\[\d+\] [\w.]*(Error|Interrupt)\b", line)]
    assert [line.partition(" ")[0] for line in last] == [f"[{rank}]"], ended.stdout


def on_rank_1(text):
    """A script in which rank 1 runs some code while the others wait in a collective."""
    return f"""
import signal
from keras_dist import ops
runtime.init()
ops.barrier()
if runtime.rank() == 1:
    fault()
    {text}
    time.sleep(60)
ops.allreduce(1.0, name="loss")
"""


@pytest.mark.fault("user code raises while others wait in a collective", ENDS, within=5)
def test_user_code_raises(job):
    ended = job(3, on_rank_1("raise ValueError('broken on purpose')"), bare=True)
    assert_told_once(ended, 1, "broken on purpose")


@pytest.mark.fault("user code raises under Open MPI", ENDS, within=5)
def test_user_code_raises_under_open_mpi(job, open_mpi):
    ended = job(3, on_rank_1("raise ValueError('broken on purpose')"), bare=True, python=open_mpi)
    assert_told_once(ended, 1, "broken on purpose")


def test_a_rank_that_aborts_goes_no_further(job):
    """`Abort` of MPICH returns, and the launcher ends the process later."""
    text = f"""
from mpi4py import MPI
class Returning(MPI.Intracomm):
    def Abort(self, errorcode=0):
        pass
{on_rank_1("MPI.COMM_WORLD = Returning(MPI.COMM_WORLD); raise ValueError('broken on purpose')")}
"""
    ended = job(2, text, bare=True)
    assert_told_once(ended, 1, "broken on purpose")
    assert "[0] " not in ended.stdout, ended.stdout


@pytest.mark.fault("user code raises while others compute, outside Python", ENDS, within=5)
def test_user_code_raises_while_others_compute(job):
    text = """
import ctypes
runtime.init()
if runtime.rank() == 1:
    fault()
    raise ValueError("broken on purpose")
ctypes.PyDLL(None).sleep(60)
"""
    assert_told_once(job(3, text, bare=True), 1, "broken on purpose")


@pytest.mark.fault("a rank raises before `keras_dist.init()`", ENDS, within=5)
def test_an_exception_before_init(job):
    text = """
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    fault()
    raise ValueError("broken before init")
runtime.init()
"""
    ended = job(2, text, bare=True)
    assert ended.returncode != 0
    assert ended.stdout.count("ValueError: broken before init") == 1


@pytest.mark.fault("a rank runs out of memory (`RLIMIT_AS`) and raises", ENDS, within=5)
def test_a_rank_without_memory(job):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))"
    ended = job(3, on_rank_1(f"{limit}; bytearray(2**33)"), bare=True)
    assert_told_once(ended, 1, "MemoryError")


@pytest.mark.fault(
    "a rank runs out of memory in a reduction",
    "the same error on every rank; the job can continue",
    within=15,
)
def test_a_rank_without_memory_within_a_reduction(job):
    text = """
import numpy as np
from keras_dist import ops, errors
from keras_dist._engine.shm import bucket_reduction
runtime.init()
mine, reduce_each = np.full(2**20, 1.0, np.float32), bucket_reduction.reduce_each
def without_memory(*_):
    bucket_reduction.reduce_each = reduce_each
    fault()
    raise MemoryError
if runtime.rank() == 1:
    bucket_reduction.reduce_each = without_memory
try:
    ops.allreduce(mine)
except errors.RankError as error:
    os.write(1, f"{error}\\n".encode())
assert ops.allreduce(mine, op="sum").max() == 3
"""
    ended = job(3, text, bare=True)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("Expected every rank to reduce its slice") == 3
    assert ended.stdout.count("Received: MemoryError().") == 1
    assert ended.stdout.count("Received: an error on another rank.") == 2


@pytest.mark.fault("SIGINT on one rank", f"{ENDS} (130)", within=5)
def test_an_interrupt_of_one_rank(job):
    ended = job(3, on_rank_1("os.kill(os.getpid(), signal.SIGINT)"), bare=True)
    assert_told_once(ended, 1, "KeyboardInterrupt")
    assert ended.returncode == 130


@pytest.mark.fault("a rank raises while others wait for queued operations", ENDS, within=5)
@pytest.mark.parametrize("handles", ["dropped", "kept"])
def test_an_exception_whatever_is_queued(job, handles):
    text = f"""
from keras_dist.ops import asynchronous
if runtime.rank() == 1:
    handle = asynchronous.allreduce_async(1.0)
    {"handle.wait()" if handles == "kept" else ""}
    asynchronous.allreduce_async(1.0)
    fault()
    raise ValueError("broken on purpose")
handle = asynchronous.allreduce_async(1.0)
asynchronous.allreduce_async(1.0)
asynchronous.synchronize(asynchronous.allreduce_async(1.0))
"""
    assert_told_once(job(2, text, bare=True), 1, "broken on purpose")


@pytest.mark.fault(
    "a thread of a rank raises instead of calling a collective",
    "its traceback, marked with the rank; when the rank ends, the reason on every rank",
    within=5,
)
def test_an_exception_in_a_thread(job):
    text = """
import threading
from keras_dist import ops
runtime.init()
def work():
    if runtime.rank() == 1:
        fault()
        raise ValueError("broken on purpose")
    ops.allreduce(1.0, name="loss")
thread = threading.Thread(target=work, name="loader")
thread.start()
thread.join()
"""
    ended = job(2, text, bare=True)
    assert_told_once(ended, 1, "broken on purpose")
    assert "[1] Exception in thread loader:" in ended.stdout
    assert (
        "[rank 1 of 2] Expected allreduce('loss') as on rank 0. Received: the end" in ended.stdout
    )


@pytest.mark.fault(
    "a `Compressor` raises on one rank of two nodes, within the reduction", ENDS, within=5
)
def test_a_compressor_raises(job):
    text = """
import numpy as np
import keras_dist
from keras_dist import ops
runtime.init()
class Broken(keras_dist.Compressor):
    def compress(self, array):
        if runtime.rank() == 1:
            fault()
            raise ValueError("broken on purpose")
        return array.astype(np.float16)
    def decompress(self, array, dtype):
        return array.astype(dtype)
ops.allreduce(np.ones(100_000, np.float32), compression=Broken())
"""
    ended = job(2, text, bare=True, MPIR_CVAR_NUM_CLIQUES="2")
    assert_told_once(ended, 1, "broken on purpose")


# --- In training


TRAINING = """
import keras, numpy as np, keras_dist
keras_dist.init()
rank = keras_dist.rank()
def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    return model
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
def fit(*others, data=(x, y), behind=(), **options):
    options = {"verbose": 0, "batch_size": 4, "epochs": 2, **options}
    callbacks = [*keras_dist.callbacks(*others), *behind]
    build().fit(*data, callbacks=callbacks, **options)
"""


@pytest.mark.fault("a hook of a callback raises in `fit`, not on the root", ENDS, within=5)
def test_a_callback_raises(job):
    text = f"""{TRAINING}
class Broken(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if rank == 1:
            fault()
            raise ValueError("broken on purpose")
fit(Broken())
"""
    assert_told_once(job(2, text, KERAS_BACKEND="jax"), 1, "broken on purpose")


@pytest.mark.fault("a generator of data raises in `fit`", ENDS, within=5)
def test_a_generator_raises(job):
    text = f"""{TRAINING}
def batches():
    for turn in range(8):
        if rank == 1 and turn == 5:
            fault()
            raise ValueError("broken on purpose")
        yield x, y
fit(data=(batches(),), batch_size=None, steps_per_epoch=4)
"""
    assert_told_once(job(2, text, KERAS_BACKEND="jax"), 1, "broken on purpose")


@pytest.mark.fault("a function of a `tf.data` pipeline raises in `fit`", ENDS, within=5)
def test_a_pipeline_raises(job):
    text = f"""{TRAINING}
import tensorflow as tf
def load(number):
    if rank == 1 and number == 5:
        fault()
        raise ValueError("broken on purpose")
    return x
data = tf.data.Dataset.range(8).map(lambda n: (tf.py_function(load, [n], tf.float32), y))
data = data.map(lambda x, y: (tf.ensure_shape(x, (8, 3)), y))
fit(data=(data,), batch_size=None)
"""
    ended = job(2, text)
    assert ended.returncode != 0
    assert "[1] ValueError: broken on purpose" in ended.stdout
    assert "[0] " not in ended.stdout, ended.stdout
