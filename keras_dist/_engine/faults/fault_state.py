"""What a communicator knows of ranks that died, joined or differed."""

import dataclasses
from collections.abc import Callable
from typing import Any

from keras_dist._engine.signature import JoinedRanks

__all__ = ["FaultState"]


@dataclasses.dataclass
class FaultState:
    """Faults of one communicator.

    Args:
        retry: the `Retry` that repeats operations where the job continues without ranks that die;
            `None` where the job ends.
        losses: number of ranks that have died.
        mismatch: message of the last `MismatchError`.
        joined: set while some ranks have called `join` and others still reduce.
        on_missing: called when `joined` is set while this rank reduces.
    """

    retry: Any = None
    losses: int = 0
    mismatch: str | None = None
    joined: JoinedRanks | None = None
    on_missing: Callable[[], None] | None = None
