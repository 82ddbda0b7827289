"""Messages beside the collectives, questions to many ranks, alarms, services. See decision 45."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

NAP_SECONDS = 0.5e-3
FANOUT = 8
QUESTION, ANSWER = "question", "answer"

A = TypeVar("A")  # an answer
Key = tuple[int, int]  # the rank that began an inquiry, and its number there
Ranks = tuple[int, ...]
ALARM, CONFIRMATION = "alarm", "confirmation"


class Mailbox:
    """Messages of one thread, of the collectives unless MPI allows any. Collective to make."""

    def __init__(self, world: Any):
        self._world = world.Dup()
        self._sent: list[Any] = []
        self._arriving: list[Any] = []

    def post(self, rank: int, message: Any) -> None:
        """Sends an object to another rank. Does not block."""
        self._sent.append(self._world.issend(message, rank))

    def receive(self) -> list[Any]:
        """Returns the objects that have arrived. Does not block."""
        while (message := self._world.improbe()) is not None:
            self._arriving.append(message.irecv())
        self._sent = [request for request in self._sent if not request.test()[0]]
        tested = [(request, *request.test()) for request in self._arriving]
        self._arriving = [request for request, has_arrived, _ in tested if not has_arrived]
        return [message for _, has_arrived, message in tested if has_arrived]

    def close(self, check: Callable[[], None] = lambda: None) -> None:
        """Closes the mailbox; no message is lost. Collective: every rank; blocks."""
        # A sender knows that its messages have been received (Issend). A rank enters the barrier
        # when its own have been, and receives those of others until all have entered.
        barrier = None
        while barrier is None or not barrier.Test():
            self.receive()
            if barrier is None and not self._sent:
                barrier = self._world.Ibarrier()
            check()
            time.sleep(NAP_SECONDS)
        self._world.Free()


def branches(ranks: Sequence[int]) -> list[Sequence[int]]:
    """Divides ranks into at most `FANOUT` branches of about the same size, to pass messages on."""
    # Branches are runs of ranks, so that most of a branch is on the same node.
    count = min(FANOUT, len(ranks))
    bounds = [len(ranks) * place // count for place in range(count + 1)] if count else []
    return [ranks[low:high] for low, high in itertools.pairwise(bounds)]


def height(count: int) -> int:
    """Returns the levels of the tree below a rank."""
    levels = 0
    while count > 0:
        levels, count = levels + 1, -(-count // FANOUT) - 1
    return levels


def parent(rank: int, root: int, size: int) -> int:
    """Returns the rank above a rank in the tree of all ranks, in the order from `root` on."""
    place = (rank - root) % size
    above, low, high = 0, 1, size
    while True:
        inside = range(low, high)
        branch = next(part for part in branches(inside) if part[0] <= place <= part[-1])
        if branch[0] == place:
            return (above + root) % size
        above, low, high = branch[0], branch[0] + 1, branch[-1] + 1


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

    A rank answers at once for itself, asks the ranks below it, and sends their answers together. A
    rank that does not answer in time, because it is stopped for example, hides no other: the rank
    above it asks those below it instead.
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
        return bool(self._open)

    def ask(self, ranks: Sequence[int]) -> Inquiry[A]:
        self._began += 1
        inquiry: Inquiry[A] = Inquiry((self._rank, self._began), self._rank)
        if self._rank in ranks:
            inquiry.found[self._rank] = self._answer()
            ranks = [rank for rank in ranks if rank != self._rank]
        self._ask_below(inquiry, ranks)
        return inquiry

    def handle(self, kind: str, sender: int, key: Key, *more: Any) -> None:
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


@dataclasses.dataclass
class _Alarm:
    """An alarm that this rank has sent: to whom, when, and whether it was confirmed."""

    root: int
    receiver: int
    sent_at: float
    is_own: bool
    is_confirmed: bool = False


class Alarms:
    """The alarms that this rank raises or passes on to the rank that investigates.

    Equal alarms of several ranks are passed on once, so that the root of many ranks receives a few.
    A rank that does not confirm an alarm is left out: the sender turns to the root itself, and if
    the root does not confirm either, to the next rank as the root.
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
        return not all(alarm.is_confirmed for alarm in self._sent.values())

    def raise_alarm(self, ranks: Ranks, ends: bool) -> None:
        self._pass_on(ranks, ends, self._root, is_own=True)

    def handle(self, sender: int, ranks: Ranks, ends: bool, root: int) -> None:
        self._post(sender, CONFIRMATION, ranks, ends)
        self._pass_on(ranks, ends, root, is_own=False)

    def confirm(self, ranks: Ranks, ends: bool) -> None:
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


class Services:
    """What runs beside the collectives of a communicator, such as the stall watchdog.

    A service has `close`, collective; `abandon`, which ends it alone after a rank has died; and
    `stop_communication`, after which it sends no more until it is abandoned.
    """

    def __init__(self, comm: Any):
        self._comm = comm
        self._factories: list[Callable[[Any], Any]] = []
        self._running: list[Any] = []

    def start(self, factory: Callable[[Any], Any]) -> None:
        """Starts a background service, now and after each loss of a rank. Collective; blocks."""
        self._factories.append(factory)
        self._running.append(factory(self._comm))

    def restart(self) -> None:
        """Abandons the running services and starts all again. Collective; blocks."""
        self._abandon()
        for factory in self._factories:  # one at a time: a rank may die in between
            self._running.append(factory(self._comm))

    def detach(self) -> None:
        """Makes the services send no more messages until `restart`."""
        for service in self._running:
            service.stop_communication()

    def close(self, wait: bool = True) -> None:
        if wait:
            for service in self._running:
                service.close()
            self._running = []
        else:
            self._abandon()

    def _abandon(self) -> None:
        for service in self._running:
            service.abandon()
        self._running = []
