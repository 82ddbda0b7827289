"""The greeting of two ranks before one sends to the other, and how a rank declines.

A rank that has come to a rendezvous of all ranks declines: a rank that waits for it in `send` or
`recv` cannot come to the rendezvous, so neither would ever continue.
"""

import dataclasses
from typing import Any

import numpy as np

from keras_dist._engine.shm.wait import noted

HELLO = 1  # MPI tag; messages of collectives have tag 0


@dataclasses.dataclass(frozen=True)
class Hello:
    """What one of two ranks tells the other."""

    rank: int
    call: Any
    dtype: np.dtype | None = None
    goes: bool = True


def decline(world: Any, rank: int) -> None:
    """Declines the greetings of ranks that wait for this one."""
    while (message := world.improbe(tag=HELLO)) is not None:
        hello = message.recv()
        world.send(Hello(rank, str(noted()), goes=False), hello.rank, HELLO)
