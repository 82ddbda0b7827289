"""Ranks with different control flow in `fit` agree, or all raise an error."""

import pytest
from test_mismatch import assert_all_told
from test_raises import assert_told_once

NAMED = "an error on every rank that names the argument, its values and the remedy"


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
    "`stop_training` set on one rank, by a callback after those of `keras_dist.callbacks()`",
    "all ranks stop after the same epoch",
    within=5,
)
@pytest.mark.fault(
    "`fit` with `keras_dist.callbacks()` on one rank, without on another",
    "an error on every rank that names the rank",
    within=20,  # this rank compiles its step first
)
def test_different_arguments_of_fit(fit_job):
    ended = fit_job("fit_faults.py", "different_arguments")
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
    "KeyboardInterrupt in `fit` on one rank",
    "the traceback once, marked with the rank; all ranks end, exit code 130",
    within=5,
)
def test_an_interrupt_in_fit(fit_job):
    ended = fit_job("fit_faults.py", "interrupted")
    assert_told_once(ended, 1, "KeyboardInterrupt")
    assert ended.returncode == 130
