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
        update_size: number of ranks in the last attempt to reduce gradients; a repeated attempt,
            without ranks that have died, sets it again. 0 at the begin of a step.
        spawned: ranks that MPI has spawned; Open MPI does not survive their death.
        endures: whether ranks may die after some have been spawned.
        joins: how often ranks have joined.
        changes: how often the ranks have changed, by deaths or joins.
        mismatch: message of the last `MismatchError`.
        joined: set while some ranks have called `join` and others still reduce.
        on_missing: called when `joined` is set while this rank reduces.
    """

    retry: Any = None
    losses: int = 0
    update_size: int = 0
    spawned: frozenset[int] = frozenset()
    endures: bool = True
    joins: int = 0
    changes: int = 0
    mismatch: str | None = None
    joined: JoinedRanks | None = None
    on_missing: Callable[[], None] | None = None
