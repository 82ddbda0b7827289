"""What comes before a collective: those of programs that run behind the script's back.

JAX returns from a compiled program while that still waits for its inputs. What the script calls
next was asked for after the collectives of the program; if it overtook them on one rank and not on
another, each would get what is meant for the other, without an error where shapes are equal.
"""

from collections.abc import Callable

__all__ = ["let_earlier_end", "wait_first"]

_waits: list[Callable[[], None]] = []


def wait_first(wait: Callable[[], None]) -> None:
    """Has every collective wait for what has been begun before it.

    Args:
        wait: returns when the programs have ended that this thread has begun.
    """
    if wait not in _waits:
        _waits.append(wait)


def let_earlier_end() -> None:
    """Waits for programs that this thread has begun. Not while it holds what they may need."""
    for wait in _waits:
        wait()
