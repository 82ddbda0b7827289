"""Training with local steps resumes to the bit: each rank has the state of its own steps."""

import os
import signal
import time

import keras
import numpy as np
import pytest
from interrupting import Interrupt, Interrupted, everything_of
from small_training import BATCH, make_data, make_model

import keras_dist
from keras_dist import LocalSteps
from keras_dist.callbacks import BackupAndRestore, ShardedCheckpoint
from keras_dist.resume.rank_states import OwnSteps
from keras_dist.runtime.exit_hooks import PREEMPTED_EXIT_CODE
from keras_dist.training.model_state import state_of_steps, to_numpy

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")

STEPS = 5


STREAMING = {"fragments": 2, "delay": 1}


def train(*callbacks, steps=2, epochs=2, streaming=None, compression="none", width=16, **options):
    optimizer = keras.optimizers.Adam(0.01, **options)
    local_steps = LocalSteps(steps, **(streaming or {}))
    wrapped = keras_dist.DistributedOptimizer(
        optimizer, local_steps=local_steps, compression=compression
    )
    model = make_model(wrapped, regularised=True, width=width, metrics=["accuracy"])
    x, y = make_data(STEPS * BATCH, seed=keras_dist.rank())
    callbacks = keras_dist.callbacks(*callbacks)
    fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": epochs}
    history = model.fit(x, y, callbacks=callbacks, **fit)
    return everything_of(model), history.history, model


@on_each_backend
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (BackupAndRestore, {}),
        (ShardedCheckpoint, {"gradient_accumulation_steps": 2, "use_ema": True}),
    ],
)
def test_resumed_training_equals_uninterrupted_training(shared_tmp_path, kind, options):
    # A generation ends the round, also in the training that is not interrupted.
    expected = train(kind(shared_tmp_path / "whole", save_freq=3), **options)
    folder = shared_tmp_path / "interrupted"
    with pytest.raises(Interrupted):
        train(kind(folder, save_freq=3), Interrupt(1, 3), **options)
    keras_dist.barrier()
    assert train(kind(folder, save_freq=3), **options)[:2] == expected[:2]


POWERSGD = "powersgd(rank=2, min_compression_rate=1)"


@pytest.mark.parametrize("compression", ["none", "int8", "topk(ratio=0.1)", POWERSGD])
def test_training_with_fragments_resumes_to_the_bit(shared_tmp_path, compression):
    options = {"streaming": STREAMING, "compression": compression, "width": 256}
    expected = train(BackupAndRestore(shared_tmp_path / "whole", save_freq=3), **options)
    folder = shared_tmp_path / "interrupted"
    with pytest.raises(Interrupted):
        train(BackupAndRestore(folder, save_freq=3), Interrupt(1, 3), **options)
    keras_dist.barrier()
    found = train(BackupAndRestore(folder, save_freq=3), **options)
    assert found[:2] == expected[:2]
    kept = [model.optimizer._keras_dist.feedback for *_, model in (found, expected)]
    for name in ("errors", "bases"):
        values = [list(getattr(each, name).values()) for each in kept]
        for pair in zip(*values, strict=True):
            np.testing.assert_array_equal(*pair)
    compressed = {"none": 0, POWERSGD: 2}.get(compression, 1)
    assert len(kept[0].errors) == (compressed if keras_dist.size() > 1 else 0)


class Preempted(keras.callbacks.Callback):
    """Sends the last rank a signal in the second half of three epochs; counts the updates."""

    updates = 0

    def on_train_batch_end(self, batch, logs=None):
        self.updates += 1
        if self.updates == 8 and keras_dist.rank() == keras_dist.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.5)  # for the thread that hears it


@pytest.mark.parametrize(
    "streaming", [{}, pytest.param(STREAMING, marks=pytest.mark.jobs("jax-2"))]
)
def test_a_signal_within_a_round_is_resumed_to_the_bit(shared_tmp_path, streaming):
    folder, preempted = shared_tmp_path / "interrupted", Preempted()
    how = {"steps": 4, "epochs": 3, "streaming": streaming}
    with pytest.raises(SystemExit, match=f"^{PREEMPTED_EXIT_CODE}$"):
        train(BackupAndRestore(folder, save_freq=1000), preempted, **how)
    assert 8 <= preempted.updates < 3 * STEPS
    keras_dist.barrier()
    found = train(BackupAndRestore(folder, save_freq=1000), **how)
    # A generation ends the round, whatever asks for it.
    whole = BackupAndRestore(shared_tmp_path / "whole", save_freq=preempted.updates)
    assert found[:2] == train(whole, **how)[:2]


def test_another_number_of_fragments_is_refused(shared_tmp_path):
    folder = shared_tmp_path / "interrupted"
    with pytest.raises(Interrupted):
        train(BackupAndRestore(folder), Interrupt(1, 1))
    keras_dist.barrier()
    with pytest.raises(keras_dist.errors.CheckpointError, match="Pass to LocalSteps the fragments"):
        train(BackupAndRestore(folder), streaming={"fragments": 2})


def test_training_resumes_at_an_epoch(shared_tmp_path):
    expected = train(epochs=3)
    folder = shared_tmp_path / "interrupted"
    with pytest.raises(Interrupted):
        train(BackupAndRestore(folder), Interrupt(1), epochs=3)
    keras_dist.barrier()
    assert train(BackupAndRestore(folder), epochs=3)[:2] == expected[:2]


def test_a_job_of_another_size_averages_the_state_of_steps():
    model = train(epochs=1)[-1]
    own = [to_numpy(variable).copy() for variable in state_of_steps(model)]
    states = [[value + number for value in own] for number in range(keras_dist.size() + 2)]
    OwnSteps(model).take(states)
    shift = np.mean(range(len(states)))
    for variable, value in zip(state_of_steps(model), own, strict=True):
        is_float = keras.backend.is_float_dtype(variable.dtype)
        wanted = value + shift if is_float else value
        np.testing.assert_allclose(to_numpy(variable), wanted, rtol=1e-6)
