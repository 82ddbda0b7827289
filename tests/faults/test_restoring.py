"""Killed training resumes bit for bit: optimizers that are built late, random numbers."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import PREAMBLE
from jobs import lean
from test_restart import RUN, end_of

TRAINING = """
import os, signal, sys
from pathlib import Path
import keras, numpy as np, keras_dist
from gans import TwoOptimizers
keras_dist.init()
keras.utils.set_random_seed(7 + keras_dist.rank())
folder, dies = Path(sys.argv[1]), sys.argv[2] == "True"
x = np.random.default_rng(keras_dist.rank()).standard_normal((24, 6)).astype("float32")
model = TwoOptimizers(seed=None)
model.compile(*(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)) for _ in range(2)))
class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        marker = folder / "died"
        if self.epoch == 2 and batch == 4 and keras_dist.rank() == 1 and not marker.exists():
            marker.touch()
            fault()
            os.kill(os.getpid(), signal.SIGKILL)
backup = keras_dist.callbacks.BackupAndRestore(str(folder / "backup"), save_freq=4)
callbacks = keras_dist.callbacks(backup, *([Die()] if dies else []))
model.fit(x, batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
if keras_dist.rank() == 0:
    np.savez(folder / "weights", *model.get_weights())
"""


@pytest.mark.fault(
    "a rank is killed in the training of a GAN with two optimizers, each built at its first step",
    "the restarted job builds and restores both; the weights equal those of an uninterrupted run "
    "bit for bit",
    within=120,
)
@pytest.mark.fault(
    "a rank is killed within an epoch of arrays that `fit` shuffles, with `Dropout` without a seed",
    "the random generators of each rank are restored; the weights equal those of an uninterrupted "
    "run bit for bit",
    within=120,
)
def test_late_optimizers_and_random_numbers_go_on(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PREAMBLE + TRAINING)
    modules = str(Path(__file__).parents[1] / "parallel")
    found = []
    for dies in (True, False):
        folder = tmp_path / str(dies)
        folder.mkdir()
        with subprocess.Popen(
            [*RUN, "-np", "2", "--max-restarts", "1", str(script), str(folder), str(dies)],
            env=lean(FAULT_FOLDER=str(tmp_path), PYTHONPATH=modules, KERAS_BACKEND="torch"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job:
            try:
                printed = end_of(job, tmp_path, timeout=120)
            finally:
                job.kill()
        assert job.returncode == 0, printed
        assert ("Restart 1 of 1" in printed) == dies
        assert "a backup does not keep" not in printed
        found.append(np.load(folder / "weights.npz"))
    interrupted, whole = found
    for name in whole.files:
        assert (interrupted[name] == whole[name]).all()


@pytest.mark.fault(
    "`fit` with a backup trains on data whose order a resumed run cannot restore",
    "one warning before the first step names the data and the remedy",
    within=60,
)
def test_an_order_that_is_lost_is_said(job):
    ended = job(
        2,
        """
import tempfile
import keras, numpy as np, tensorflow as tf, keras_dist
keras_dist.init()
x = np.random.default_rng(keras_dist.rank()).standard_normal((8, 2)).astype("float32")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
folder = keras_dist.broadcast_object(tempfile.mkdtemp())
def fit(data, **options):
    backup = keras_dist.callbacks.BackupAndRestore(folder)
    model.fit(data, epochs=2, verbose=0, callbacks=keras_dist.callbacks(backup), **options)
fault()
pipeline = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
fit(pipeline.batch(4))
fit(x, y=x[:, :1], shuffle=False)
print("said nothing", flush=True)
keras_dist.barrier()
fit(pipeline.shuffle(8, seed=1).batch(4))
""",
    )
    assert ended.returncode == 0, ended.stdout
    before, _, after = ended.stdout.partition("said nothing")
    assert "a backup does not keep" not in before
    assert after.count("a backup does not keep the order of a tf.data.Dataset") == 1
    assert "keras_dist.data.shard(...)" in after
