"""Signals of batch systems: all ranks stop after the same step, save, and set the exit code."""

import json

import pytest

from keras_dist.runtime.exit_hooks import PREEMPTED_EXIT_CODE

TRAIN = """
import json, pathlib, signal, sys
import keras, numpy as np
import keras_dist

folder = pathlib.Path(os.environ["BACKUP"])
keras_dist.init()
rank = keras_dist.rank()
rng = np.random.default_rng(0)
x = rng.standard_normal((160, 6)).astype("float32")
y = (x @ rng.standard_normal((6, 3))).argmax(axis=1)

class Seen(keras.callbacks.Callback):
    "Where this rank has been, and what happens there."
    def __init__(self, strike=None):
        super().__init__()
        self.strike, self.epoch, self.steps = strike, None, []
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        if logs:
            self.steps.append((self.epoch, batch))
        if self.strike:
            self.strike(self.epoch, batch)
    def on_test_end(self, logs=None):
        if self.strike:
            self.strike(self.epoch, "validation")

def fit(*callbacks, epochs=3, validation_data=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input((6,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dropout(0.4, seed=3),
        keras.layers.Dense(3, activation="softmax"),
    ])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    data = keras_dist.data.shard((x, y), batch_size=8)
    model.fit(data, epochs=epochs, verbose=0, validation_data=validation_data,
              callbacks=keras_dist.callbacks(*callbacks))
    return model

def strike_at(place, number, ranks):
    def strike(*here):
        if here == place and rank in ranks:
            fault()
            os.kill(os.getpid(), number)
            time.sleep(0.1)  # for the thread that hears it
    return strike
"""

PREEMPTED = "all ranks end after the same step, with a backup and exit code 75"
SAID = "all 2 ranks stop, in fit, epoch {}, update {}. A backup is in {}. Start the job again"


@pytest.mark.fault(
    "SIGTERM on one rank during an epoch",
    f"{PREEMPTED}; started again, the job ends with the weights of an uninterrupted one, bit for "
    "bit",
    within=15,
)
def test_sigterm_on_one_rank(job, tmp_path):
    text = f"""{TRAIN}
seen = Seen(strike_at((1, 4), signal.SIGTERM, [1]))
try:
    fit(seen, keras_dist.callbacks.BackupAndRestore(folder))
finally:
    (folder.parent / f"steps-{{rank}}").write_text(json.dumps(seen.steps))
"""
    backup = tmp_path / "backup"
    ended = job(2, text, BACKUP=str(backup), KERAS_BACKEND="jax")
    assert ended.returncode == PREEMPTED_EXIT_CODE, ended.stdout
    first, second = (json.loads((tmp_path / f"steps-{rank}").read_text()) for rank in (0, 1))
    assert first == second
    epoch, batch = first[-1]
    assert (epoch, batch) in [(1, 5), (1, 6)]  # 10 batches per epoch
    said = f"keras_dist: SIGTERM on rank 1: {SAID.format(2, batch + 1, backup)}"
    assert ended.stdout.count(said) == 1, ended.stdout
    assert "Traceback" not in ended.stdout

    text = f"""{TRAIN}
seen = Seen()
resumed = fit(seen, keras_dist.callbacks.BackupAndRestore(folder))
assert seen.steps[0] == ({epoch}, {batch + 1}), seen.steps
assert seen.steps[-1] == (2, 9)
expected = fit()
for one, other in zip(resumed.get_weights(), expected.get_weights(), strict=True):
    assert one.tobytes() == other.tobytes()
assert [v.numpy().tobytes() for v in resumed.optimizer.variables] == [
    v.numpy().tobytes() for v in expected.optimizer.variables
]
assert not folder.exists()
fault()  # there is none in this job
"""
    ended = job(2, text, BACKUP=str(backup), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault("SIGUSR1 on all ranks during validation", "the same after validation", within=15)
def test_sigusr1_on_all_ranks(job, tmp_path):
    text = f"""{TRAIN}
strike = Seen(strike_at((1, "validation"), signal.SIGUSR1, [0, 1]))
fit(strike, keras_dist.callbacks.BackupAndRestore(folder), validation_data=(x, y))
"""
    ended = job(2, text, BACKUP=str(tmp_path / "backup"), KERAS_BACKEND="jax")
    assert ended.returncode == PREEMPTED_EXIT_CODE, ended.stdout
    both = "keras_dist: SIGUSR1 on rank 0, SIGUSR1 on rank 1: "
    assert ended.stdout.count(both) == 1, ended.stdout
    assert SAID.format(2, 10, tmp_path / "backup") in ended.stdout
    assert len(list((tmp_path / "backup").iterdir())) == 2


@pytest.mark.fault(
    "a second SIGTERM while a rank does not finish its step",
    "the job ends at once, exit code not 0",
    within=5,
)
def test_a_second_signal(job, tmp_path):
    text = f"""{TRAIN}
import threading
def strike(*here):
    if here == (1, 4) and rank == 1:
        def twice():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2.5)
            fault()
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=twice).start()
        time.sleep(1000)
fit(Seen(strike))
"""
    ended = job(2, text, BACKUP=str(tmp_path), KERAS_BACKEND="jax")
    assert ended.returncode not in (0, PREEMPTED_EXIT_CODE)
    assert "keras_dist: SIGTERM again: this rank ends now." in ended.stdout


@pytest.mark.fault(
    "a signal that the script handles itself, and one on a forked child",
    "training continues; afterwards the previous handlers are restored",
    within=60,
)
def test_signals_that_are_not_ours(job, tmp_path):
    text = f"""{TRAIN}
import multiprocessing
came = []
signal.signal(signal.SIGUSR1, lambda *_: came.append(rank))
def strike(*here):
    if here == (1, 4) and rank == 1:
        fault()
        os.kill(os.getpid(), signal.SIGUSR1)
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM
seen = Seen(strike)
fit(seen)
assert came == [1] * rank and len(seen.steps) == 30
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    ended = job(2, text, BACKUP=str(tmp_path), KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout
