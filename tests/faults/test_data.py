"""Failures of ranks that read for other ranks."""

import numpy as np
import pytest

READING = """
import signal
import numpy as np
import keras_dist
from keras_dist.data import epochs, npy, row_source
row_source.for_keras = lambda batches, ahead: batches
runtime.init()
rank = runtime.rank()
data = npy(os.environ["ROWS"], None, 16, block=40, readers=1)
rows, prefetched = [], {}
for step in range(data.plan.steps):
    if rank == int(os.environ["DIES"]) and step == 5:
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
    rows += prefetched.pop(step, None) or data.batch(0, step).tolist()
    keras_dist.allreduce(np.float32(1))
    if step == 7:
        if rank == 1:  # the other ranks read it after the resharding
            prefetched[8] = data.batch(0, 8).tolist()
        read = keras_dist.allgather_object(epochs.positions())
        with epochs.locked():
            epochs.reshard(runtime.rank(), runtime.size(), read)
rows = [row for part in keras_dist.allgather_object(rows) for row in part]
print(f"rows {len(rows)} {len(set(rows))}", flush=True)
"""


STUCK = """
import time
import keras_dist
from keras_dist.data import npy, readers, row_source
row_source.for_keras = lambda batches, ahead: batches
runtime.init()
data = npy(os.environ["ROWS"], None, 16, block=40, readers=1)
if runtime.rank() == 0:
    readers.FileReader.read = lambda *_: time.sleep(1000)
fault()
data.batch(0, 0)
"""


@pytest.mark.fault(
    "a rank that reads for others blocks in its file system",
    "after `KERAS_DIST_STALL_SECONDS` (here 1) it is named; at the limit (here 3) the job ends",
    within=15,
)
def test_a_rank_that_reads_for_others_is_stuck(job, tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(1003))
    limits = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "3"}
    ended = job(2, STUCK, bare=True, ROWS=str(tmp_path / "rows.npy"), **limits)
    assert ended.returncode != 0
    assert "keras_dist: rank 1 of 2 has waited" in ended.stdout
    assert "for rank 0 in a request to rank 0" in ended.stdout
    assert "The job ends now: the limit is 3 s" in ended.stdout


@pytest.mark.parametrize("dies", [0, 2])
def test_the_others_read_on_and_share_out_the_rest(job, open_mpi, tmp_path, dies):
    np.save(tmp_path / "rows.npy", np.arange(1003))
    variables = {"ROWS": str(tmp_path / "rows.npy"), "DIES": str(dies)}
    ended = job(
        3,
        READING,
        bare=True,
        python=open_mpi,
        options=("--with-ft", "ulfm"),
        KERAS_DIST_ON_FAILURE="continue",
        **variables,
    )
    assert ended.returncode == 0, ended.stdout
    # The batches of the dead rank before the resharding are missing, read or not.
    assert ended.stdout.count(f"rows {1003 - 9 * 16} {1003 - 9 * 16}") == 2, ended.stdout
