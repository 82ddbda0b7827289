"""Position of a resumed fit in its data, and warnings if the order of data differs."""

import logging
from typing import Any

import keras

from keras_dist import runtime
from keras_dist.data import epochs
from keras_dist.data.restarted_iterators import restarted

_log = logging.getLogger("keras_dist")


def global_batch() -> int | None:
    """Returns the global batch size if the order of samples is independent of `size()`."""
    data = epochs.current()
    return data.global_batch if data is not None else None


def steps_now(about: dict[str, Any], warns: bool) -> int:
    """Converts the step of a backup to the global batch size of this job."""
    log = _log.warning if warns else _log.debug
    step, before, now = about["step"], about.get("global_batch"), global_batch()
    if before and now and before != now:
        step, again = divmod(step * before, now)
        if again:
            log(
                "%d samples of epoch %d are trained on twice: the backup was written after a "
                "number of samples that is no multiple of the global batch size, %d.",
                again,
                about["epoch"] + 1,
                now,
            )
    elif step and not now and about.get("ranks", runtime.fit_size()) != runtime.fit_size():
        log(
            "The backup was written by %d ranks and its epoch resumes on %d, in a different order "
            "of data: samples may be repeated or skipped. Use "
            "keras_dist.data.shard(..., shuffle='global'), whose order is the same for any number "
            "of ranks.",
            about["ranks"],
            runtime.fit_size(),
        )
    return step


def warn_of_restarting_data() -> None:
    """Warns of data whose order cannot be resumed."""
    found = restarted(epochs.fit_arguments(), keras.backend.backend())
    if found:
        _log.warning(
            "keras_dist: a backup does not keep %s: data restarts when training resumes, which "
            "then ends with different weights. Use keras_dist.data.shard(...) on data before it is "
            "shuffled, and omit steps_per_epoch: its order can be resumed.",
            "; nor ".join(found),
        )
