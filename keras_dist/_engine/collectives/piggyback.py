"""Notices, as of a signal, on the next reduction of gradients. See decisions 32 and 76."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

Listener = Callable[[list[str]], None]


class _State:
    notice: str | None = None
    listener: Listener | None = None


class _Held(threading.local):
    told: list[Callable[[], None]] | None = None


_held = _Held()


def hold(work: Callable[[], Any]) -> tuple[Any, list[Callable[[], None]]]:
    """Returns the result of a function, and what is to be told later, see `release`."""
    held: list[Callable[[], None]] = []
    _held.told = held
    try:
        return work(), held
    finally:
        _held.told = None


def release(found: tuple[Any, list[Callable[[], None]]]) -> Any:
    """Tells what was noticed; returns the result of the function."""
    result, held = found
    for each in held:
        each()
    return result


def tell(listener: Callable[[], None]) -> None:
    """Calls a function that may stop training, now or later."""
    if _held.told is None:
        listener()
    else:
        _held.told.append(listener)


def set_listener(listener: Listener) -> None:
    """Sets the function that receives the notices of all ranks; drops a pending notice."""
    _State.notice, _State.listener = None, listener


def remove_listener(listener: Listener) -> None:
    """Removes a function, unless another one has taken its place."""
    if _State.listener == listener:
        _State.notice = _State.listener = None


def has_listener() -> bool:
    """Returns whether a listener is set."""
    return _State.listener is not None


def post(text: str) -> None:
    """Sets the notice of this rank, in place of an earlier one. Any thread may call this."""
    _State.notice = text


def notice() -> str | None:
    """Returns the pending notice of this rank."""
    return _State.notice


def deliver(notices: Sequence[str | None]) -> None:
    """Calls the listener with the notices of all ranks."""
    texts = [text for text in notices if text is not None]
    if texts:
        _State.notice = None
        if _State.listener is not None:
            tell(functools.partial(_State.listener, texts))
