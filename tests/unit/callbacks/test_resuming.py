"""Where an epoch goes on that other ranks, or another global batch, have begun."""

import pytest

from keras_dist import runtime
from keras_dist.callbacks import resuming


@pytest.mark.parametrize(
    ("batches", "ranks", "step", "told"),
    [
        ((None, None), 3, 5, "written by 2 ranks and its epoch resumes on 3"),
        ((None, None), 2, 5, ""),
        ((12, 12), 3, 5, ""),
        ((12, 6), 3, 10, ""),
        ((12, 8), 3, 7, "4 samples of epoch 1 are trained on twice"),
    ],
)
def test_a_step_of_other_ranks_is_converted(monkeypatch, caplog, batches, ranks, step, told):
    before, now = batches
    monkeypatch.setattr(resuming, "global_batch", lambda: now)
    monkeypatch.setattr(runtime, "fit_size", lambda: ranks)
    about = {"step": 5, "epoch": 0, "ranks": 2, "global_batch": before}
    assert resuming.steps_now(about, warns=True) == step
    assert told in caplog.text and bool(caplog.text) == bool(told)
