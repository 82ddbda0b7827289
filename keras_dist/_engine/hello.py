"""What two ranks tell each other before one sends to the other, and how a rank declines."""

import dataclasses
from typing import Any

import numpy as np

from keras_dist._engine.shm.wait import noted

__all__ = ["HELLO", "Hello", "turn_away"]

HELLO = 1  # a tag of MPI; what collectives send from rank to rank has 0


@dataclasses.dataclass(frozen=True)
class Hello:
    """What one of two ranks tells the other.

    Args:
        rank: who tells it.
        call: what it is about to do.
        dtype: what it sends.
        goes: whether it sends or receives; not where it is in a meeting of all ranks.
        why: why it does not, though it should: what the other raises, as a whole message.
    """

    rank: int
    call: Any
    dtype: np.dtype | None = None
    goes: bool = True
    why: str | None = None


def turn_away(world: Any, rank: int) -> None:
    """Tells ranks that wait here for this one that it has come to a meeting of all ranks.

    They hold what that meeting needs, and this rank waits there: neither would ever go on.

    Args:
        world: the MPI communicator of the job.
        rank: this rank.
    """
    while (message := world.improbe(tag=HELLO)) is not None:
        hello = message.recv()
        world.send(Hello(rank, str(noted()), goes=False), hello.rank, HELLO)
