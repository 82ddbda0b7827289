"""Questions to many ranks, asked and answered over a tree.

A rank answers at once for itself, asks the ranks below it, and sends their answers together. A rank
that does not answer in time, because it is stopped for example, hides no other: the rank above it
asks those below it instead. Nothing blocks; the messages travel through a mailbox.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from keras_dist._engine.rank_tree import branches, height

QUESTION, ANSWER = "question", "answer"

A = TypeVar("A")  # an answer
Key = tuple[int, int]  # the rank that began an inquiry, and its number there


@dataclasses.dataclass
class _Branch:
    """The ranks below one that was asked, since when, and whether it has answered for itself."""

    below: Sequence[int]
    since: float
    has_answered: bool = False


@dataclasses.dataclass
class Inquiry(Generic[A]):
    """An inquiry in progress, on a rank that asks."""

    key: Key
    asker: int
    found: dict[int, A] = dataclasses.field(default_factory=dict)
    open: dict[int, _Branch] = dataclasses.field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have answered, or had their time."""
        return not self.open


class Inquiries(Generic[A]):
    """The inquiries that this rank begins or passes on.

    Args:
        patience: seconds that a rank has to answer for itself.
    """

    def __init__(
        self,
        rank: int,
        post: Callable[..., None],
        answer: Callable[[], A],
        note: Callable[[Mapping[int, A]], None],
        patience: float,
    ):
        self._rank, self._post, self._answer, self._note = rank, post, answer, note
        self._patience = patience
        self._open: dict[Key, Inquiry[A]] = {}
        self._began = 0

    @property
    def are_open(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._open)

    def ask(self, ranks: Sequence[int]) -> Inquiry[A]:
        """Begins an inquiry."""
        self._began += 1
        inquiry: Inquiry[A] = Inquiry((self._rank, self._began), self._rank)
        if self._rank in ranks:
            inquiry.found[self._rank] = self._answer()
            ranks = [rank for rank in ranks if rank != self._rank]
        self._ask_below(inquiry, ranks)
        return inquiry

    def handle(self, kind: str, sender: int, key: Key, *more: Any) -> None:
        """Handles a message of another rank."""
        if kind == QUESTION:
            (below,) = more
            self._send_answer(sender, key, {self._rank: self._answer()}, not below)
            self._ask_below(Inquiry(key, sender), below)
            return
        found, is_complete = more
        if key[0] == self._rank:
            self._note(found)
        inquiry = self._open.get(key)
        if inquiry is not None:
            inquiry.found.update(found)
            branch = inquiry.open.get(sender)
            if branch is not None and not is_complete:
                branch.since, branch.has_answered = time.perf_counter(), True
            elif branch is not None:
                del inquiry.open[sender]
                self._conclude(inquiry)
        elif key[0] != self._rank:  # too late for the rank that asked, not for the one that began
            self._post(key[0], ANSWER, sender, key, found, is_complete)

    def check(self) -> None:
        """Asks the ranks below those that have not answered in time."""
        now = time.perf_counter()
        for inquiry in list(self._open.values()):
            late = [
                rank
                for rank, branch in inquiry.open.items()
                if now - branch.since > self._time_for(branch)
            ]
            below = [inquiry.open.pop(rank).below for rank in late]
            for ranks in below:
                self._ask_below(inquiry, ranks)
            if late:
                self._conclude(inquiry)

    def forget(self) -> None:
        """Forgets all inquiries."""
        self._open.clear()

    def _time_for(self, branch: _Branch) -> float:
        levels = 2 * height(len(branch.below)) if branch.has_answered else 1
        return levels * self._patience

    def _ask_below(self, inquiry: Inquiry[A], ranks: Sequence[int]) -> None:
        now = time.perf_counter()
        for branch in branches(ranks):
            self._open[inquiry.key] = inquiry
            inquiry.open[branch[0]] = _Branch(branch[1:], now)
            self._post(branch[0], QUESTION, self._rank, inquiry.key, branch[1:])

    def _conclude(self, inquiry: Inquiry[A]) -> None:
        if not inquiry.is_over:
            return
        was_open = self._open.pop(inquiry.key, None) is not None
        if was_open and inquiry.asker != self._rank:
            self._send_answer(inquiry.asker, inquiry.key, inquiry.found, True)

    def _send_answer(self, asker: int, key: Key, found: Mapping[int, A], is_complete: bool) -> None:
        self._post(asker, ANSWER, self._rank, key, found, is_complete)
