"""Programs that must end before the next collective starts.

JAX returns from a compiled program while that still waits for its inputs. If the next call of the
script overtook the collectives of the program on one rank and not on another, the ranks would
exchange the wrong data, without an error where shapes are equal.
"""

from collections.abc import Callable

_waits: list[Callable[[], None]] = []


def set_completion(wait: Callable[[], None]) -> None:
    """Makes every collective call a function first."""
    if wait not in _waits:
        _waits.append(wait)


def finish_pending() -> None:
    """Waits for programs that this thread has started.

    Do not call it while holding a lock that the programs may need.
    """
    for wait in _waits:
        wait()
