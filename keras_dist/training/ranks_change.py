"""A change of the ranks between two steps of a fit: the fit ends, and starts again with others."""

import contextlib
from collections.abc import Callable
from typing import Any

from keras_dist import runtime
from keras_dist.data import epochs
from keras_dist.runtime import growth

# What a process that joins needs besides the state of the fit: `epochs.history`, the positions from
# which the ranks share out the data, and the ranks that are behind, see `epochs.reshard`.
SharedState = tuple[list[epochs.Distribution], epochs.Positions, list[int]]

_is_resuming = False
_fits = 0


class RanksChange(Exception):
    """Raised on every rank, out of `fit`: the ranks change, and the fit goes on in memory."""

    def __init__(self, apply: Callable[[], None]):
        super().__init__("The ranks of the job change.")
        self.apply = apply


def is_resuming() -> bool:
    """Returns whether the fit that begins continues one that ended with `RanksChange`."""
    return _is_resuming


def resumed() -> None:
    """Notes that the fit has been restored."""
    global _is_resuming
    _is_resuming = False


def count() -> int:
    """Returns the number of fits that this process has begun."""
    return _fits


def again_if_ranks_change(fit: Callable[[], Any]) -> Any:
    """Runs a fit, again whenever the ranks change; joins a job before, if this process is to."""
    global _fits, _is_resuming
    _fits += 1
    with contextlib.ExitStack() as stack:
        stack.callback(resumed)
        if growth.is_waiting():
            _join()
        while True:
            try:
                return fit()
            except RanksChange as change:
                apply = change.apply
            apply()
            _is_resuming = True


def _join() -> None:
    global _is_resuming
    history, positions, behind = growth.connect({"fit": _fits})
    epochs.replay(history)
    epochs.reshard(runtime.rank(), runtime.size(), [positions], behind)
    _is_resuming = True
