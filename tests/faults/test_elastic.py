"""`keras_dist.elastic`: a state that outlives ranks, in place and by a new start of the job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IN_PLACE = """
import signal
import numpy as np
from keras_dist import collectives, elastic
runtime.init()
me = runtime.rank()
resets = []
state = elastic.ObjectState(step=0, total=0.0, seen=[])
state.register_reset_callbacks([lambda: resets.append(runtime.size())])

@elastic.run
def train(state):
    state.seen.append(runtime.size())
    while state.step < 6:
        if me == 1 and state.step == 3:
            fault()
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += float(collectives.allreduce(1.0, op="sum"))
        state.step += 1
        state.commit()
    return "done"

if me == 2:
    state.step = 5  # the root's counts
assert train(state) == "done"
assert (state.step, state.total, state.seen, resets) == (6, 3 * 3 + 3 * 2, [3, 2], [2]), vars(state)
state.step, state.total = 99, -1.0
state.restore()
assert (state.step, state.total) == (6, 15.0)
"""


@pytest.mark.fault(
    "a rank is killed in a function of `elastic.run`, under Open MPI's ULFM",
    "the others finish the step, are told at the next commit, and go on with equal state",
    within=20,
)
def test_an_elastic_training_goes_on(job, open_mpi):
    options = ("--with-ft", "ulfm")
    ended = job(3, IN_PLACE, bare=True, python=open_mpi, options=options)
    assert ended.returncode == 0, ended.stdout


RESTARTED = """
import os
import sys
os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import keras_dist
from keras_dist import elastic
keras_dist.init()
keras.utils.set_random_seed(keras_dist.rank())
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
state = elastic.KerasState(model, directory={directory!r}, epoch=0, batch=0)
first = os.environ["KERAS_DIST_RESTART"] == "0"

class Fail(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if first and epoch == 1:
            raise RuntimeError("no more")

@elastic.run
def train(state):
    kernel = keras.ops.convert_to_numpy(model.layers[0].kernel)
    assert np.allclose(kernel, keras_dist.broadcast(kernel))
    if keras_dist.rank() == 0:
        print(f"{{keras_dist.size()}} ranks, epoch {{state.epoch}}", flush=True)
    model.fit(
        np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0,
        initial_epoch=state.epoch, epochs=4, callbacks=[
            elastic.UpdateEpochStateCallback(state),
            elastic.UpdateBatchStateCallback(state),
            Fail(),
            elastic.CommitStateCallback(state, batches_per_commit=1),
        ],
    )
    assert (state.epoch, state.batch) == (4, 0)

train(state)
keras_dist.verify_replicas(model)
"""


def test_a_restart_takes_the_hosts_that_there_are_then(tmp_path):
    answer = tmp_path / "answers"
    answer.write_text("localhost:1\nlocalhost:2\n")
    # Each time it is asked it gives the next line.
    script = f"head -n 1 {answer} && sed -i 1d {answer}"
    train = tmp_path / "train.py"
    train.write_text(RESTARTED.format(directory=str(tmp_path / "state")))
    command = [sys.executable, "-m", "keras_dist.cli", "run", "--max-restarts", "1"]
    command += ["--host-discovery-script", script, "--min-np", "1", "--max-np", "4", str(train)]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        command,
        env={**os.environ, **path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert "1 ranks, epoch 0" in ended.stdout
    assert "2 ranks, epoch 1" in ended.stdout  # the second epoch was not committed
