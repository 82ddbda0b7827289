"""What a rank has to tell all others at their next update, such as that it has been asked to stop.

It costs nothing as long as there is nothing to tell. A rank that has something comes to the
reduction of gradients with another digest; so the ranks tell each other their calls, as at any
difference, and all hear of it within the same update. Knows no signals and moves nothing itself.
"""

from collections.abc import Callable, Sequence

__all__ = ["hear", "listen", "notice", "tell"]

Listener = Callable[[list[str]], None]


class _Board:
    mine: str | None = None
    listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Sets who is called, in whatever thread, with what ranks tell. What is pending is dropped."""
    _Board.mine, _Board.listener = None, listener


def tell(text: str) -> None:
    """Notes what this rank has to tell, in place of anything before. From any thread."""
    _Board.mine = text


def notice() -> str | None:
    """Returns what this rank has to tell, if anything."""
    return _Board.mine


def hear(told: Sequence[str | None]) -> None:
    """Hands on what the ranks have told, in rank order; `None` for those that had nothing."""
    texts = [text for text in told if text is not None]
    if texts:
        _Board.mine = None
        if _Board.listener is not None:
            _Board.listener(texts)
