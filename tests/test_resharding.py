"""Sharded state after the death of a rank: training resumes on another number of ranks."""

import pytest
from jobs import lean

TRAINING = """
import hashlib, os, signal, sys
import keras, numpy as np
import keras_dist

folder, shards, kills = sys.argv[1], sys.argv[2] == "sharded", sys.argv[3] == "kill"
keras_dist.init()
keras.utils.set_random_seed(1)


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if kills and keras_dist.rank() == 1 and int(self.model.optimizer.iterations) == 7:
            os.kill(os.getpid(), signal.SIGKILL)


x = np.random.default_rng(0).standard_normal((240, 7)).astype("float32")
data = keras_dist.data.shard((x, x[:, :3]), batch_size=8)
layers = [keras.Input((7,)), keras.layers.Dense(301, "relu"), keras.layers.Dense(3)]
model = keras.Sequential(layers)
model.compile(
    keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=shards), "mse"
)
backup = keras_dist.callbacks.BackupAndRestore(folder, save_freq=2)
model.fit(data, epochs=2, verbose=0, callbacks=keras_dist.callbacks(backup, Kill()))
if keras_dist.rank() == 0:
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    print("ended after", int(model.optimizer.iterations), hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.slow
def test_a_job_that_is_killed_resumes_sharded_on_another_number_of_ranks(run_ranks, tmp_path):
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    env = lean(KERAS_BACKEND="jax")  # which starts fastest

    def train(ranks, folder, how, then):
        return run_ranks(ranks, script, tmp_path / folder, how, then, env=env)

    last_lines = []
    for folder, how in (("a", "sharded"), ("b", "whole")):
        assert train(2, folder, how, "kill").returncode != 0
        ended = train(3, folder, how, "go")
        assert ended.returncode == 0, ended.stdout
        last_lines.append(next(li for li in ended.stdout.splitlines() if "ended after" in li))
    assert last_lines[0] == last_lines[1]
