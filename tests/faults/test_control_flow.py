"""Ranks with different control flow in `fit` agree, or all raise an error."""

import pytest
from test_mismatch import assert_all_told
from test_raises import TRAINING, assert_told_once

NAMED = "an error on every rank that names the argument, its values and the remedy"

DISAGREE = """
import contextlib, io
cases = {
    "epochs": dict(epochs=2 + rank),
    "initial_epoch": dict(initial_epoch=1 - rank),
    "validation_data": dict(validation_data=(x, y) if rank else None),
    "validation_freq": dict(validation_data=(x, y), validation_freq=1 + rank),
    "callbacks": dict(others=[keras_dist.callbacks.ModelCheckpoint("no.keras")] * rank),
}
for name, options in cases.items():
    began = time.monotonic()
    try:
        fit(*options.pop("others", ()), **options)
    except keras_dist.errors.MismatchError as error:
        print(f"{rank} {name} {error}\\n", end="", flush=True)
    assert time.monotonic() - began < 5
"""


@pytest.mark.fault("`epochs` or `initial_epoch` of `fit` differ", NAMED, within=5)
@pytest.mark.fault(
    "`validation_data` on only one rank, or another `validation_freq`", NAMED, within=5
)
@pytest.mark.fault("a callback of keras_dist on only one rank", NAMED, within=5)
@pytest.mark.fault(
    "a callback inside `RootOnly` raises, on the root",
    "a `CallbackError` with its message on every rank",
    within=5,
)
@pytest.mark.fault(
    "`fit` with `keras_dist.callbacks()` on one rank, without on another",
    "an error on every rank that names the rank",
    within=20,  # this rank compiles its step first
)
def test_different_arguments_of_fit(job):
    text = f"""{TRAINING}{DISAGREE}
class Broken(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise ValueError("broken on purpose")
try:
    fit(keras_dist.callbacks.RootOnly(Broken()))
except keras_dist.errors.CallbackError as error:
    print(f"{{rank}} {{error}}\\n", end="", flush=True)
# Root-only callbacks and verbose may differ.
root_only = [keras.callbacks.CSVLogger(os.environ["FAULT_FOLDER"] + "/log.csv")]
fit(behind=root_only if rank == 0 else (), verbose=2 * rank)
fault()
if rank == 0:
    fit()
else:
    build().fit(x, y, verbose=0)
"""
    ended = job(2, text, KERAS_BACKEND="jax")
    for rank in range(2):
        for name, expected, received in [
            ("epochs", 2, 3),
            ("initial_epoch", 1, 0),
            ("validation_data", "none", "some"),
            ("validation_freq", 1, 2),
        ]:
            message = (
                f"{rank} {name} [rank 1 of 2] Expected {name}={expected} in fit as on rank 0. "
                f"Received: {name}={received}. Pass the same {name}."
            )
            assert message in ended.stdout, ended.stdout
        assert f"{rank} callbacks [rank 1 of 2] Expected callbacks=RootCons" in ended.stdout
        assert f"{rank} [rank 0 of 2] Expected Broken.on_epoch_end to succeed" in ended.stdout
    assert "ModelCheckpoint, " in ended.stdout
    assert "PreemptionCallback. Pass the callbacks of keras_dist on" in ended.stdout
    expected = "Expected the begin of fit with the callbacks of keras_dist as on rank 0."
    told = f"[rank 1 of 2] {expected} Received: allreduce('the losses of a step')."
    assert_all_told(ended, 2, told)


@pytest.mark.fault(
    "`stop_training` set on one rank, by a callback after those of `keras_dist.callbacks()`",
    "all ranks stop after the same epoch",
    within=5,
)
def test_a_stop_set_on_one_rank(job):
    text = f"""{TRAINING}
class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if rank == 1 and epoch == 1:
            fault()
            self.model.stop_training = True
fit(behind=[Stop()], epochs=10**6)
"""
    ended = job(2, text, KERAS_BACKEND="jax")
    assert ended.returncode == 0, ended.stdout


@pytest.mark.fault(
    "KeyboardInterrupt in `fit` on one rank",
    "the traceback once, marked with the rank; all ranks end, exit code 130",
    within=5,
)
def test_an_interrupt_in_fit(job):
    text = f"""
import signal
{TRAINING}
class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if rank == 1 and epoch == 2:
            fault()
            os.kill(os.getpid(), signal.SIGINT)
fit(Interrupt(), epochs=10**6)
"""
    ended = job(2, text, KERAS_BACKEND="jax")
    assert_told_once(ended, 1, "KeyboardInterrupt")
    assert ended.returncode == 130


@pytest.mark.fault(
    "KeyboardInterrupt in `fit` on one rank, caught by its script",
    "an error on every rank when that rank ends",
    within=5,
)
def test_an_interrupt_that_is_caught(job):
    text = f"""{TRAINING}
class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if rank == 1 and epoch == 2:
            fault()
            raise KeyboardInterrupt
try:
    fit(Interrupt(), epochs=10**6)
except KeyboardInterrupt:
    pass
"""
    ended = job(2, text, KERAS_BACKEND="jax")
    assert ended.returncode != 0
    assert (
        "Received: the end of the script. Rank 0 is in fit, epoch 3, rank 1 after" in ended.stdout
    )
