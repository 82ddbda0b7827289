"""What a communicator knows of ranks that died, joined or differed."""

import dataclasses
from collections.abc import Callable
from typing import Any

from keras_dist._engine.signature import JoinedRanks


@dataclasses.dataclass
class FaultState:
    """Faults of one communicator."""

    retry: Any = None
    losses: int = 0
    changes: int = 0
    mismatch: str | None = None
    joined: JoinedRanks | None = None
    on_missing: Callable[[], None] | None = None
