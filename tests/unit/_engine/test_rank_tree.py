"""Trees of ranks, and mailboxes: inquiries and alarms among ranks of this process."""

import collections

import pytest

from keras_dist._engine import sideband

SIZES = [1, 2, 3, 8, 9, 10, 24, 74, 600]
PATIENCE = 1.0


class Network:
    """Ranks with a mailbox each, and a clock that this test advances."""

    def __init__(self, size, monkeypatch):
        self.now, self.stopped = 0.0, set()
        self.queues = [collections.deque() for _ in range(size)]
        self.sent, self.received = collections.Counter(), collections.Counter()
        monkeypatch.setattr(sideband.time, "perf_counter", lambda: self.now)

    def post(self, sender):
        def post(rank, *message):
            self.sent[sender] += 1
            self.queues[rank].append(message)

        return post

    def deliver(self, handle):
        """Delivers all messages, also those that are sent meanwhile, but to stopped ranks."""
        moving = True
        while moving:
            moving = False
            for rank, queue in enumerate(self.queues):
                while queue and rank not in self.stopped:
                    self.received[rank] += 1
                    handle(rank, *queue.popleft())
                    moving = True

    def wait(self):
        self.now += 1.01 * PATIENCE
        for rank, found in enumerate(self.ranks):
            if rank not in self.stopped:
                found.check()
        self.run()


class Asked(Network):
    """Ranks that answer with ten times their number."""

    def __init__(self, size, monkeypatch):
        super().__init__(size, monkeypatch)
        self.noted = {}
        self.ranks = [
            sideband.Inquiries(
                rank, self.post(rank), lambda rank=rank: 10 * rank, self.noted.update, PATIENCE
            )
            for rank in range(size)
        ]

    def run(self):
        self.deliver(lambda rank, *message: self.ranks[rank].handle(*message))


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_one_parent_and_few_children(size):
    above = {}

    def divide(rank, below):
        parts = sideband.branches(below)
        assert len(parts) <= sideband.FANOUT
        for part in parts:
            assert part[0] not in above
            above[part[0]] = rank
            divide(part[0], part[1:])

    def depth(rank):
        return 0 if rank == 0 else 1 + depth(above[rank])

    divide(0, range(1, size))
    assert sorted(above) == list(range(1, size))
    assert max(map(depth, range(size))) == sideband.height(size - 1)
    root = size // 3
    for rank in above:
        shifted = sideband.parent((rank + root) % size, root, size)
        assert (shifted - root) % size == above[rank]


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_answer_and_no_rank_exchanges_messages_with_all(size, monkeypatch):
    network = Asked(size, monkeypatch)
    found = network.ranks[0].ask(range(size))
    network.run()
    assert found.is_over
    assert found.found == {rank: 10 * rank for rank in range(size)}
    # Each child is asked once and answers twice: for itself, and for the ranks below it.
    for rank in range(size):
        assert network.sent[rank] <= sideband.FANOUT + 2
        assert network.received[rank] <= 2 * sideband.FANOUT + 1


@pytest.mark.parametrize("asker", [0, 5])
def test_a_rank_that_does_not_answer_hides_no_other(asker, monkeypatch):
    network = Asked(80, monkeypatch)
    ranks = [rank for rank in range(80) if rank % 7]
    [relay, below, *_] = sideband.branches([rank for rank in ranks if rank != asker])[3]
    network.stopped = {relay, below}
    inquiry_ = network.ranks[asker].ask(ranks)
    network.run()
    for _ in range(2 * sideband.height(len(ranks))):
        network.wait()
    assert inquiry_.is_over
    assert sorted({*ranks} - {*inquiry_.found}) == [relay, below]

    network.noted.clear()
    network.stopped = set()
    network.run()
    assert network.noted.keys() >= {relay, below}  # they answer late


def test_a_rank_that_stops_after_its_own_answer_hides_no_other(monkeypatch):
    network = Asked(80, monkeypatch)
    [relay, *below] = sideband.branches(range(1, 80))[3]
    handle = network.ranks[relay].handle

    def answer_and_stop(*message):
        network.stopped.add(relay)
        handle(*message)

    network.ranks[relay].handle = answer_and_stop
    found = network.ranks[0].ask(range(80))
    network.run()
    assert not found.is_over
    assert relay in found.found and not set(below) & set(found.found)
    for _ in range(4 * sideband.height(79)):
        network.wait()
    assert found.is_over and len(found.found) == 80


class Alarmed(Network):
    """Ranks that note the alarms that they receive as the root."""

    def __init__(self, size, monkeypatch):
        super().__init__(size, monkeypatch)
        self.cases = collections.Counter()

        def receive(rank):
            return lambda ranks, ends: self.cases.update([(rank, ranks, ends)])

        self.ranks = [
            sideband.Alarms(rank, size, self.post(rank), receive(rank), PATIENCE, 10)
            for rank in range(size)
        ]

    def run(self):
        handlers = {sideband.ALARM: "handle", sideband.CONFIRMATION: "confirm"}

        def handle(rank, kind, *more):
            getattr(self.ranks[rank], handlers[kind])(*more)

        self.deliver(handle)


@pytest.mark.parametrize("size", SIZES[1:])
def test_equal_alarms_reach_the_root_from_a_few_ranks(size, monkeypatch):
    network = Alarmed(size, monkeypatch)
    for rank in network.ranks:
        rank.raise_alarm((0, 1), False)
    network.run()
    assert {rank for rank, *_ in network.cases} == {0}
    for rank in range(size):
        assert network.received[rank] <= sideband.FANOUT + 1
        assert network.sent[rank] <= sideband.FANOUT + 1


@pytest.mark.parametrize("stopped", [(0,), (0, 1), "a relay", "a relay and the root"])
def test_an_alarm_finds_a_way_around_ranks_that_are_stopped(stopped, monkeypatch):
    size, last = 80, 79
    network = Alarmed(size, monkeypatch)
    if isinstance(stopped, str):
        relay = sideband.parent(last, 0, size)
        assert relay > 0
        stopped = (relay, 0) if "root" in stopped else (relay,)
    network.stopped = set(stopped)
    network.ranks[last].raise_alarm((0, last), True)
    network.run()
    for _ in range(2 * len(stopped) + 2):
        network.wait()
    assert len(network.cases) == 1
    [(receiver, ranks, ends)] = network.cases
    assert receiver == min(set(range(size)) - network.stopped)
    assert (ranks, ends) == ((0, last), True)


def test_an_alarm_is_repeated_only_after_a_while(monkeypatch):
    network = Alarmed(3, monkeypatch)
    for _ in range(3):
        network.ranks[2].raise_alarm((0, 2), False)
        network.run()
    assert network.received[0] == 1
    network.now += 6
    network.ranks[2].raise_alarm((0, 2), False)
    network.run()
    assert network.received[0] == 2


def test_an_alarm_that_is_repeated_still_finds_another_root(monkeypatch):
    network = Alarmed(3, monkeypatch)
    network.stopped = {0}
    for _ in range(4):
        network.now += 1.01 * PATIENCE
        network.ranks[2].raise_alarm((0, 2), True)  # before the check, as the watchdog does
        network.ranks[2].check()
        network.run()
    assert {receiver for receiver, *_ in network.cases} == {1}


class DeadPeer:
    """The part of an MPI communicator that a mailbox uses; another rank never closes its own."""

    def Dup(self):
        return self

    def improbe(self):
        return None

    def Ibarrier(self):
        return self

    def Test(self):
        return False


def test_a_close_ends_where_waiting_is_useless():
    checks = []

    def check():
        checks.append(None)
        if len(checks) == 3:
            raise ConnectionError("a rank has died")

    with pytest.raises(ConnectionError, match="a rank has died"):
        sideband.Mailbox(DeadPeer()).close(check)
