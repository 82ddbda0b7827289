"""Alarms of ranks that wait too long, on their way to the rank that investigates, usually the root.

An alarm goes up a tree of ranks. Equal alarms of several ranks are passed on once, so that the root
of many ranks receives a few. A rank that does not confirm an alarm is left out: the sender turns to
the root itself, and if the root does not confirm either, to the next rank as the root.
"""

import dataclasses
import time
from collections.abc import Callable

from keras_dist._engine.faults.rank_state import Ranks
from keras_dist._engine.rank_tree import parent

__all__ = ["ALARM", "CONFIRMATION", "Alarms"]

ALARM, CONFIRMATION = "alarm", "confirmation"


@dataclasses.dataclass
class _Alarm:
    """An alarm that this rank has sent: to whom, when, and whether it was confirmed."""

    root: int
    receiver: int
    sent_at: float
    is_own: bool
    is_confirmed: bool = False


class Alarms:
    """The alarms that this rank raises or passes on.

    Args:
        patience: seconds until a confirmation.
        period: seconds between the alarms of a rank that keeps waiting, before the limit.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        post: Callable[..., None],
        receive: Callable[[Ranks, bool], None],
        patience: float,
        period: float,
    ):
        self._rank, self._size, self._post, self._receive = rank, size, post, receive
        self._patience, self._period = patience, period
        self._root = 0  # changes when a root does not confirm
        self._sent: dict[tuple[Ranks, bool], _Alarm] = {}

    @property
    def are_pending(self) -> bool:
        """Whether a confirmation is awaited."""
        return not all(alarm.is_confirmed for alarm in self._sent.values())

    def raise_alarm(self, ranks: Ranks, ends: bool) -> None:
        """Raises an alarm of this rank."""
        self._pass_on(ranks, ends, self._root, is_own=True)

    def handle(self, sender: int, ranks: Ranks, ends: bool, root: int) -> None:
        """Handles an alarm from another rank."""
        self._post(sender, CONFIRMATION, ranks, ends)
        self._pass_on(ranks, ends, root, is_own=False)

    def confirm(self, ranks: Ranks, ends: bool) -> None:
        """Handles a confirmation."""
        if (alarm := self._sent.get((ranks, ends))) is not None:
            alarm.is_confirmed = True

    def check(self) -> None:
        """Sends alarms that were not confirmed in time to another rank."""
        now = time.perf_counter()
        for (ranks, ends), alarm in list(self._sent.items()):
            if alarm.is_confirmed or now - alarm.sent_at <= self._patience:
                continue
            root, receiver = alarm.root, alarm.root
            if alarm.receiver == alarm.root:
                root = receiver = (root + 1) % self._size
            if alarm.is_own:
                self._root = root
            self._send(ranks, ends, _Alarm(root, receiver, now, alarm.is_own))

    def withdraw(self) -> None:
        """Forgets the alarms of this rank, which waits no more."""
        self._root = 0
        self._sent = {key: alarm for key, alarm in self._sent.items() if not alarm.is_own}

    def forget(self) -> None:
        """Forgets all alarms."""
        self._root = 0
        self._sent.clear()

    def _pass_on(self, ranks: Ranks, ends: bool, root: int, is_own: bool) -> None:
        now = time.perf_counter()
        earlier = self._sent.get((ranks, ends))
        between = (self._patience if ends else self._period) / 2
        if earlier is not None:
            is_recent = earlier.root == root and now - earlier.sent_at < between
            if is_recent or not earlier.is_confirmed:
                return
        receiver = root if root == self._rank else parent(self._rank, root, self._size)
        self._send(ranks, ends, _Alarm(root, receiver, now, is_own))

    def _send(self, ranks: Ranks, ends: bool, alarm: _Alarm) -> None:
        self._sent[ranks, ends] = alarm
        if alarm.receiver == self._rank:
            alarm.is_confirmed = True
            self._receive(ranks, ends)
        else:
            self._post(alarm.receiver, ALARM, self._rank, ranks, ends, alarm.root)
