"""Faults of operations in GPU memory, over the test double of NCCL; see `gpu_double`."""

from pathlib import Path

import pytest

DOUBLE = {"_KERAS_DIST_GPU_DOUBLE": str(Path(__file__).parents[1] / "gpu_double.py")}
ULFM = ("--with-ft", "ulfm")

# Each rank contributes a power of two, so a sum shows which ranks contributed.
STEPS = """
import numpy as np
from keras_dist import _engine, _gpu
_backends.active().gpu_number = lambda: 0
runtime.init()
comm, me = runtime.communicator(), runtime.rank()
def on_gpu(array):
    allocate = lambda shape, dtype: on_gpu(np.empty(shape, dtype))
    address = array.ctypes.data
    return _gpu.DeviceArray(address, array.shape, array.dtype, array, allocate, stream=lambda: 0)
sums = []
for step in range(12):
    mine = on_gpu(np.full(50_000, 2.0**me, "float32"))
    options = _engine.OpOptions(_engine.ReduceOp.SUM)
    (total,) = _engine.collectives.allreduce(comm, [mine], ["gradients"], options, 2**20)
    total = total.finish(0) if isinstance(total, _gpu.DeviceArray) else total
    assert (total == total[0]).all()
    sums.append(int(total[0]))
if runtime.rank() == 0:
    print("sums", sums)
"""

# All ranks raise the error of one, and can go on.
CAUGHT = (
    STEPS.replace(
        "sums = []",
        """sums = []
def reduced(mine, options):
    while True:
        try:
            return _engine.collectives.allreduce(comm, [mine], ["gradients"], options, 2**20)
        except RuntimeError as error:
            text = f"rank {me} raises {type(error).__name__} {error}"
            print(text + chr(10), end="", flush=True)  # at once: other ranks print now
""",
    ).replace(
        '_engine.collectives.allreduce(comm, [mine], ["gradients"], options, 2**20)\n    total',
        "reduced(mine, options)\n    total",
    )
    + "raise SystemExit(3)"
)


@pytest.mark.fault(
    "a rank is killed while others wait on the GPU (test double of NCCL)",
    "the wait on the GPU ends with `RankLostError`, exit code not 0",
    within=5,
)
def test_a_killed_rank(job, open_mpi):
    # Other mpiexec would end the other ranks before they notice.
    started = {"bare": True, "python": open_mpi, "options": ULFM}
    ended = job(3, STEPS, **started, GPU_DOUBLE="die-in-5", **DOUBLE)
    assert ended.returncode != 0
    for rank in (0, 2):
        assert f"RankLostError: [rank {rank} of 3] Expected all ranks to come" in ended.stdout


@pytest.mark.fault(
    "an operation on the GPU does not end (test double of NCCL)",
    "after `KERAS_DIST_STALL_SECONDS` (here 1) it is named; at the limit (here 3) the job ends",
    within=15,
)
def test_an_operation_that_does_not_end(job):
    seconds = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "3"}
    ended = job(2, STEPS, bare=True, GPU_DOUBLE="stuck-in-5", **seconds, **DOUBLE)
    assert ended.returncode != 0
    waited = "ranks 0, 1 of 2 have waited 1 s for data of each other in allreduce('gradients')."
    assert waited in ended.stdout
    assert "The job ends now: the limit is 3 s" in ended.stdout


@pytest.mark.fault(
    "a rank is killed while others wait on the GPU, with `on_failure=continue` (test double)",
    "the step is reduced again by a new communicator; no step is lost, exit code 0",
    within=20,
)
def test_ranks_continue(job, open_mpi):
    ended = job(
        3,
        STEPS,
        bare=True,
        python=open_mpi,
        options=ULFM,
        KERAS_DIST_ON_FAILURE="continue",
        GPU_DOUBLE="die-in-5",
        **DOUBLE,
    )
    assert ended.returncode == 0, ended.stdout
    assert f"sums {[7] * 4 + [5] * 8}" in ended.stdout
    assert "keras_dist: rank 1 has died. 2 of 3 ranks continue" in ended.stdout


@pytest.mark.fault(
    "a rank fails between the agreement and the launch on the GPU (test double of NCCL)",
    "`RankError` with the text of that rank on every rank, exit code not 0",
    within=5,
)
@pytest.mark.parametrize(
    ("ranks", "fault"), [(2, "fail-in-5"), (3, "fail-in-5"), (3, "fail-in-init")]
)
def test_a_failed_launch(job, ranks, fault):
    ended = job(ranks, CAUGHT, bare=True, GPU_DOUBLE=fault, **DOUBLE)
    assert ended.returncode != 0
    text = f"RankError [rank 1 of {ranks}] Expected every rank to launch allreduce('gradients')"
    for rank in range(ranks):
        assert f"rank {rank} raises {text}" in ended.stdout, ended.stdout
    assert f"sums {[2**ranks - 1] * 12}" in ended.stdout


# Rank 1 fails before its fifth launch, and dies when all ranks know that.
DIES_LATER = STEPS.replace(
    "sums = []",
    """sums = []
from keras_dist._engine.nccl.ranks import NcclRanks
def die(self):
    fault()
    os.kill(os.getpid(), 9)
if me == 1:
    NcclRanks._close_failures = die
""",
)


def test_a_rank_that_dies_after_a_failed_launch(job, open_mpi):
    started = {"bare": True, "python": open_mpi, "options": ULFM}
    ended = job(3, DIES_LATER, **started, GPU_DOUBLE="fail-in-5", **DOUBLE)
    assert ended.returncode != 0
    assert ended.seconds < 5
    for rank in (0, 2):
        assert f"RankLostError: [rank {rank} of 3] Expected all ranks to " in ended.stdout


# --- The same faults in fit, on each backend

FIT = """
import hashlib, keras, numpy as np
import keras_dist
keras_dist.init()
me = keras_dist.rank()
keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01))
model.compile(optimizer, loss="mse")
x = np.random.default_rng(me).normal(size=(48, 4)).astype("float32")
try:
    model.fit(x, x[:, :1], batch_size=4, verbose=0, shuffle=False)
except Exception as error:
    text = " ".join(str(error).split())
    print(f"rank {me} of {keras_dist.size()} raises {text}", flush=True)
    raise
weights = b"".join(weight.tobytes() for weight in model.get_weights())
print("trained", keras_dist.allgather_object(hashlib.md5(weights).hexdigest()), flush=True)
"""
# The failed launch on torch represents the others; it starts fastest.
BACKENDS = ["tensorflow", "jax", "torch"]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "backend", [pytest.param("tensorflow", marks=slow), pytest.param("jax", marks=slow), "torch"]
)
def test_a_failed_launch_in_fit(job, backend):
    ended = job(2, FIT, KERAS_BACKEND=backend, GPU_DOUBLE="fail-in-5", **DOUBLE)
    assert ended.returncode != 0
    assert ended.seconds < 30
    for rank in range(2):
        assert f"rank {rank} of 2 raises" in ended.stdout
    raised = [line for line in ended.stdout.splitlines() if " raises " in line]
    assert all("[rank 1 of 2] Expected every rank to launch" in line for line in raised), raised


@slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_in_fit(job, open_mpi, backend):
    started = {"python": open_mpi, "options": ULFM, "KERAS_BACKEND": backend}
    ended = job(3, FIT, **started, GPU_DOUBLE="die-in-5", **DOUBLE)
    assert ended.returncode != 0
    assert ended.seconds < 30
    assert "Expected all ranks to come" in ended.stdout


@slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_continue_in_fit(job, open_mpi, backend):
    started = {"python": open_mpi, "options": ULFM, "KERAS_BACKEND": backend}
    started["KERAS_DIST_ON_FAILURE"] = "continue"
    ended = job(3, FIT, **started, GPU_DOUBLE="die-in-5", **DOUBLE)
    assert ended.returncode == 0, ended.stdout
    assert "2 of 3 ranks continue" in ended.stdout
    [trained] = {line for line in ended.stdout.splitlines() if line.startswith("trained")}
    first, second = trained.removeprefix("trained ").strip("[]").split(", ")
    assert first == second


@slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operation_that_does_not_end_in_fit(job, backend):
    seconds = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "3"}
    started = {"KERAS_BACKEND": backend, "GPU_DOUBLE": "stuck-in-5"}
    ended = job(2, FIT, **started, **seconds, **DOUBLE)
    assert ended.returncode != 0
    assert ended.seconds < 30
    assert "The job ends now: the limit is 3 s" in ended.stdout
