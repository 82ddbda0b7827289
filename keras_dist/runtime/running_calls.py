"""What belongs to a running call, such as the ranks of a `fit`: threads may run calls at once."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class OfCall(Generic[T]):
    """A value of the innermost call of each thread.

    Threads without a call, in which frameworks read data or call the host, see the latest one.
    """

    def __init__(self, outside: T):
        self._outside = outside
        self._every: list[T] = []
        self._thread = threading.local()

    def get(self) -> T:
        """Returns the value of the call that this thread runs, or works for."""
        return next(iter((self._own() or self._every)[-1:]), self._outside)

    def own(self) -> T:
        """Returns the value of the call that this thread itself runs."""
        return next(iter(self._own()[-1:]), self._outside)

    def every(self) -> list[T]:
        """Returns the values of all calls."""
        return list(self._every)

    @contextlib.contextmanager
    def during(self, value: T) -> Iterator[None]:
        """Gives a call of this thread a value, while it runs."""
        self._own().append(value)
        self._every.append(value)
        try:
            yield
        finally:
            self._own().pop()
            self._every.remove(value)

    def _own(self) -> list[T]:
        found: list[T] = vars(self._thread).setdefault("values", [])
        return found
