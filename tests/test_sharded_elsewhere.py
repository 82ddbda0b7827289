"""A sharded checkpoint is read by other numbers of ranks and on other backends, to the bit."""

import shutil

import pytest
from jobs import lean, told

import keras_dist

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="starts jobs of its own")

SCRIPT = """
import hashlib, sys
import keras, numpy as np
import keras_dist
from keras_dist.training import model_state
from keras_dist.training.sharded_state import whole_value

folder, saves = sys.argv[1], sys.argv[2] == "save"
keras_dist.init()
keras.utils.set_random_seed(1 + saves)
layers = [keras.Input((7,)), keras.layers.Dense(301, "relu"), keras.layers.BatchNormalization()]
model = keras.Sequential([*layers, keras.layers.Dropout(0.1), keras.layers.Dense(3)])
optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True)
model.compile(optimizer, "mse")
x = np.random.default_rng(keras_dist.rank()).standard_normal((24, 7)).astype("float32")

def fit(epochs):
    checkpoint = keras_dist.callbacks.ShardedCheckpoint(folder)
    callbacks = keras_dist.callbacks(checkpoint)
    model.fit(x, x[:, :3], 8, epochs, shuffle=False, verbose=0, callbacks=callbacks)

def bits():
    found = hashlib.sha256()
    for variable in model_state.state(model):
        value = whole_value(variable)
        found.update(value.astype("int64") if value.dtype.kind in "iu" else value)
    return found.hexdigest()

if saves:
    fit(2)
    digest = bits()
else:
    epoch = keras_dist.checkpoints.load(model, folder)
    digest = bits()
    fit(epoch)  # restores everything, and trains no epoch
    assert bits() == digest
    fit(epoch + 1)
    assert bits() != digest
    keras_dist.verify_replicas(model)
digests = keras_dist.allgather_object(digest)
assert len(set(digests)) == 1
if keras_dist.rank() == 0:
    print("bits", digest)
"""


def check(run_ranks, tmp_path, saved, *loaded):
    """Saves and loads, each with a backend and a number of ranks."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    digests = []
    for backend, ranks in (saved, *loaded):
        env = {**lean(), "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        left_out = {"jax", "sklearn", "tensorflow"} - {backend}
        env["LEFT_OUT"] = " ".join(left_out)
        how, folder = "save", tmp_path / "saved"
        if digests:
            how, folder = "load", tmp_path / f"{backend}-{ranks}"
            shutil.copytree(tmp_path / "saved", folder)  # which goes on in it
        ended = run_ranks(ranks, script, folder, how, env=env)
        digests.append(told(ended, r"bits (\w+)")[1])
        digests = digests[:1] if digests[-1] == digests[0] else digests
        assert len(digests) == 1, f"{backend} on {ranks} ranks has read other bits"


@pytest.mark.slow
def test_four_ranks_save_and_three_and_one_load_on_other_backends(run_ranks, tmp_path):
    check(run_ranks, tmp_path, ("jax", 4), ("torch", 3), ("tensorflow", 1))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_each_backend_saves_for_all(backend, run_ranks, tmp_path):
    check(run_ranks, tmp_path, (backend, 2), ("tensorflow", 1), ("jax", 3), ("torch", 1))
