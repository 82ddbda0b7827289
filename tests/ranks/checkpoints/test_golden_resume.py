"""Backups and checkpoints of each backend, kept as files, are read and trained on from.

tests/golden/resume has an archive for each backend, written on two ranks within the second epoch,
and `states.json` with the digests of the state that is read from them. See golden.py for how to
write them anew.
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys

import golden
import keras
import numpy as np
import pytest
from interrupting import Interrupt, Interrupted
from small_training import assert_close, weights_of
from start_jobs import SCRIPTS, lean

import keras_dist
from keras_dist.training import model_state
from keras_dist.training.sharded_state import whole_value

pytestmark = pytest.mark.jobs("tensorflow-2", "jax-2", "torch-2")

BACKEND = keras.backend.backend()
FILES = golden.FOLDER / "resume"
STATES = FILES / "states.json"
KINDS = {
    "backup": lambda folder: keras_dist.callbacks.BackupAndRestore(folder / "backup", save_freq=1),
    "checkpoints": lambda folder: keras_dist.callbacks.ShardedCheckpoint(
        folder / "checkpoints", save_freq=1, keep=1, asynchronous=False
    ),
}


def numbers(*shape):
    """Returns numbers that are equal on every machine and with every version."""
    count = np.arange(np.prod(shape, dtype=int))
    return ((7919 * count + 13) % 17 / 16 - 0.5).astype("float32").reshape(shape)


class Losses(keras.callbacks.Callback):
    """Keeps the losses of batches, and the digests of the state before the first of this run."""

    def __init__(self):
        super().__init__()
        self.losses, self.begins = {}, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if not self.begins:
            self.begins = [self.epoch, batch, digests(self.model)]

    def on_train_batch_end(self, batch, logs=None):
        self.losses[f"{self.epoch} {batch}"] = float(logs["loss"])

    def state_dict(self):
        return self.losses

    def load_state_dict(self, state):
        self.losses = dict(state)


def digests(model, seeds=True):
    """Returns a digest for each variable of the model and its optimizer, and for random states."""
    variables = model_state.state(model) + (model_state.random_states(model) if seeds else [])
    values = [whole_value(variable) for variable in variables]
    values = [value.astype("int64") if value.dtype.kind in "iu" else value for value in values]
    return [hashlib.sha256(value.tobytes()).hexdigest()[:16] for value in values]


def empty_generators():
    """Gives global generators a state of zeros: the files hold it, and it can be compressed."""
    random.setstate((3, (0,) * 625, None))
    np.random.set_state(("MT19937", np.zeros(624, "uint32"), 0))
    if BACKEND == "torch":
        import torch

        state = torch.get_rng_state()
        state[24:-64] = 0  # between position and seed, and cached normal numbers
        torch.set_rng_state(state)


def make(shard_state=False):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    empty_generators()
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(5, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=3),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential(layers)
    model.set_weights([numbers(*weight.shape) ** 2 for weight in model.weights])
    adam = keras_dist.DistributedOptimizer(
        keras.optimizers.Adam(0.01, epsilon=0.01), shard_state=shard_state
    )
    model.compile(adam, "mse", metrics=["mae"])
    return model


def fit(*callbacks, shard_state=False):
    """Trains for three epochs of three steps; returns weights, history and losses of batches."""
    model, losses = make(shard_state), Losses()
    x, y = numbers(36, 4), numbers(36, 2)
    data = keras_dist.data.shard((x, y), global_batch_size=12, shuffle="global")
    callbacks = keras_dist.callbacks(*callbacks, losses)
    history = model.fit(data, epochs=3, verbose=0, callbacks=callbacks).history
    keras_dist.verify_replicas(model)
    return weights_of(model), history, losses


@pytest.fixture
def unpacked(shared_tmp_path):
    """A function that unpacks the files that a backend has written."""

    def unpack(backend):
        if keras_dist.rank() == 0:
            shutil.unpack_archive(FILES / f"{backend}.zip", shared_tmp_path)
        keras_dist.barrier()
        return shared_tmp_path

    return unpack


def write(folder):
    """Writes the files of this backend, and the digests of what is read from them."""
    for kind, make_callback in KINDS.items():
        with pytest.raises(Interrupted):
            fit(make_callback(folder), Interrupt(1, 1), shard_state=kind == "checkpoints")
    keras_dist.barrier()
    if keras_dist.rank() == 0:
        for path in sorted((folder / "backup").iterdir())[:-1]:
            path.unlink()  # of the two that are kept
        shutil.make_archive(FILES / BACKEND, "zip", folder)
    keras_dist.barrier()
    model = make()
    keras_dist.checkpoints.load(model, folder / "checkpoints")
    found = {"loaded": digests(model, seeds=False)}
    for kind, make_callback in KINDS.items():
        _, _, losses = fit(make_callback(folder))
        found[kind] = keras_dist.allgather_object(losses.begins)
    if keras_dist.rank() == 0:
        states = json.loads(STATES.read_text()) if STATES.exists() else {}
        states = dict(sorted({**states, BACKEND: found}.items()))
        STATES.write_text(f"{json.dumps(states, indent=1)}\n")
    keras_dist.barrier()


@pytest.mark.long
@pytest.mark.skipif(keras_dist.size() != 2, reason="two ranks have written the files")
@pytest.mark.parity("backups and checkpoints of earlier versions resume")
def test_a_fit_goes_on_from_files_of_this_backend(unpacked, shared_tmp_path):
    if golden.WRITES:
        write(shared_tmp_path / "written")
    weights, history, losses = fit()
    states = json.loads(STATES.read_text())[BACKEND]
    for kind, make_callback in KINDS.items():
        found, resumed, others = fit(make_callback(unpacked(BACKEND)))
        assert others.begins[:2] == [1, 2]
        assert others.begins == states[kind][keras_dist.rank()], kind
        # Another machine may round differently.
        assert_close(found, weights, 1e-5)
        for values, wanted in ((others.losses, losses.losses), (resumed, history)):
            assert values.keys() == wanted.keys()
            for name, value in wanted.items():
                assert values[name] == pytest.approx(value, rel=1e-4), (kind, name)


@pytest.mark.jobs("equality")
@pytest.mark.parity("a checkpoint that any backend has written is read to the bit")
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_checkpoints_of_each_backend_are_read(backend, unpacked):
    model = make(shard_state=True)
    assert keras_dist.checkpoints.load(model, unpacked(backend) / "checkpoints") == 1
    assert digests(model, seeds=False) == json.loads(STATES.read_text())[backend]["loaded"]


@pytest.mark.skipif(keras_dist.size() != 2, reason="two ranks have written the files")
@pytest.mark.skipif(BACKEND != "torch", reason="it starts fastest")
def test_a_process_without_mpi_reads_and_exports_files_of_all_versions(shared_tmp_path):
    folders = [shared_tmp_path / name for name in ["now", "tensorflow", "jax", "torch"]]
    for kind, make_callback in KINDS.items():
        with pytest.raises(Interrupted):
            fit(make_callback(folders[0]), Interrupt(1, 1), shard_state=kind == "checkpoints")
    keras_dist.barrier()
    told = None
    if keras_dist.rank() == 0:
        for folder in folders[1:]:
            shutil.unpack_archive(FILES / f"{folder.name}.zip", folder)
        command = [sys.executable, SCRIPTS / "read_outside.py", *folders]
        ended = subprocess.run(command, env=lean(), capture_output=True, text=True, timeout=100)
        told = ended.stdout, ended.stderr
    out, errors = keras_dist.broadcast_object(told)
    assert out, errors
    found, states = json.loads(out.splitlines()[-1]), json.loads(STATES.read_text())
    for backend in ("tensorflow", "jax", "torch"):
        wanted = states[backend]["loaded"]
        assert found[f"{backend} checkpoints"] == found[f"{backend} backup"] == wanted
    assert found["now backup"] == found["now checkpoints"]
