"""Exchanges digests and the numbers of a bucket with other nodes, see decisions 41 and 58."""

import dataclasses
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, combine_into, divide, silencer
from keras_dist._engine.buckets import ALIGNMENT, aligned_array
from keras_dist._engine.mpi.topology import halving_nbytes

T = TypeVar("T")
MAX_PAYLOAD_NBYTES = 64 * 1024  # for larger buckets the number of bytes counts, not of messages
MESSAGE_NBYTES = 4 * 2**20  # memory of a message at least: that of 64 nodes
COPIED_NBYTES = 2**20  # of what is smaller than the first half: that saves a message
EAGER_NBYTES = 32 * 1024  # MPI libraries ask the receiver before they send much more
DIGEST, HALF, REST = 2, 6, 7  # MPI tags
HEADER_NBYTES = ALIGNMENT  # the digest, and the state of the exchange so far
DIGEST_NBYTES = 16
# States: a digest differs; all are equal; and the numbers of all nodes heard of are there as well.
DIFFERENT, SAME, COMPLETE = 0, 1, 2
SPINS = 32  # polls before the first yield
BYTE = np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One exchange of parts of an array with another node."""

    peer: int
    sent: slice | None
    received: slice | None

    @property
    def reverse(self) -> "Transfer":
        """The exchange that returns what this one has sent and received."""
        return Transfer(self.peer, self.received, self.sent)


def rounds(index: int, count: int, size: int) -> list[Transfer]:
    """Returns the rounds of a node: whom it sends an array to until every node has heard from all.

    Of n nodes, p take part in every round, where p is the largest power of two up to n. Each of the
    others first sends to its neighbour, and receives the result at the end.
    """
    # Neighbours exchange first: in `halving` the first messages are the largest, and neighbours
    # tend to be connected to the same switch. The order of a sum over nodes follows the rounds,
    # whichever algorithm computes it, so its bits do not depend on the size of an array.
    power, array = _power_of_two(count), slice(0, size)
    folded = count - power  # pairs of neighbours of which one takes part in every round
    is_paired = index < 2 * folded
    if is_paired and index % 2:
        return [Transfer(index - 1, array, None), Transfer(index - 1, None, array)]
    place = index // 2 if is_paired else index - folded
    distances = [2**step for step in range(power.bit_length() - 1)]
    others = [place ^ distance for distance in distances]
    plan = [Transfer(2 * p if p < folded else p + folded, array, array) for p in others]
    if is_paired:
        plan = [Transfer(index + 1, None, array), *plan, Transfer(index + 1, array, None)]
    return plan


def halving(index: int, count: int, size: int) -> list[Transfer]:
    """Returns the exchanges by which nodes halve an array until each has one segment of it."""
    # After an exchange a node combines what it has received with its own elements. At the end it
    # has the result of the elements it received last. The same exchanges in reverse, with what is
    # sent and what is received swapped, give every node the whole result.
    mine = slice(0, size)
    plan = []
    for step in rounds(index, count, size):
        if step.sent is not None and step.received is not None:
            middle = (mine.start + mine.stop) // 2
            lower, upper = slice(mine.start, middle), slice(middle, mine.stop)
            mine, given = (lower, upper) if index < step.peer else (upper, lower)
            plan.append(Transfer(step.peer, given, mine))
        elif not plan:
            plan.append(step)
    return plan


def combine_rows(rows: Sequence[T], combine: Callable[[T, T], T]) -> tuple[T, T]:
    """Combines the contributions of all nodes, but for the last combination."""
    rest = list(rows)
    while len(rest) > 2:
        whole = _power_of_two(len(rest))
        paired = 2 * (len(rest) - whole) or len(rest)
        pairs = zip(rest[:paired:2], rest[1:paired:2], strict=True)
        rest = [combine(low, high) for low, high in pairs] + rest[paired:]
    return rest[0], rest[1]


def _power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)


class _Leg:
    """An exchange with another node, and its parts of the memory of messages."""

    def __init__(
        self, step: Transfer, sent: np.ndarray, received: np.ndarray, dtype: np.dtype, lead: int
    ):
        self.peer, self.given, self.kept = step.peer, step.sent, step.received
        self.is_mutual = step.sent is not None and step.received is not None
        self.is_last = False  # whether all nodes have been heard after it
        self.lead = self.rest = slice(0, 0)
        if step.sent is not None:
            start, stop = step.sent.start, step.sent.stop
            middle = min(start + lead, stop)
            self.lead, self.rest = slice(start, middle), slice(middle, stop)
        self.message, self.outgoing = _message(sent, self.lead, dtype)
        _, self.incoming = _message(received, step.received or slice(0, 0), dtype)
        self.rest_nbytes = (self.rest.stop - self.rest.start) * dtype.itemsize
        self.expects_rest = self.incoming.size > lead
        self.rest_arrives_at = HEADER_NBYTES + min(lead, self.incoming.size) * dtype.itemsize


class Legs:
    """The exchanges of one bucket."""

    def __init__(self, there: Sequence[_Leg], back: Sequence[_Leg]):
        self.there, self.back = there, back
        own = there[-1].kept if there else None
        if there and there[-1].kept is not None:
            there[-1].is_last = True
        self.own = slice(0, 0) if own is None else own


@dataclasses.dataclass
class Payload:
    """A bucket, or a slice of one, that is reduced over nodes while ranks compare digests."""

    legs: Legs | None
    op: ReduceOp
    divisor: int
    load: Callable[["Payload"], np.ndarray | None]
    result: np.ndarray
    partial: np.ndarray | None = None
    is_slice: bool = False
    failure: Exception | None = None
    arrived: bool = False


class Peers:
    """One rank of each node, which compare digests."""

    def __init__(self, world: Any):
        self._world, self._rank, self._size = world, world.Get_rank(), world.Get_size()
        # Ranks that differ may send more than is expected. What no message uses is never touched.
        most = max(MESSAGE_NBYTES, halving_nbytes(self._size))
        longest = HEADER_NBYTES + MAX_PAYLOAD_NBYTES + most
        self._sent = aligned_array(longest, BYTE)
        self._received = aligned_array(longest, BYTE)
        self._header = self._sent[: DIGEST_NBYTES + 1].data
        self._answer = self._received[: DIGEST_NBYTES + 1].data
        # How many bytes are in the message that follows.
        self._rest_sent = self._sent[HEADER_NBYTES - 8 : HEADER_NBYTES].view(np.int64)
        self._rest_received = self._received[HEADER_NBYTES - 8 : HEADER_NBYTES].view(np.int64)
        self._silently = silencer()
        self._digests = self.legs(0, BYTE)

    def legs(self, count: int, dtype: np.dtype) -> Legs:
        """Returns the exchanges that reduce a bucket."""
        # Up to this size a node sends all it has; above, nodes halve the bucket, which takes more
        # messages and fewer bytes.
        if count * dtype.itemsize > MAX_PAYLOAD_NBYTES:
            there = halving(self._rank, self._size, count)
            back = [step.reverse for step in reversed(there)]
        else:
            there, back = rounds(self._rank, self._size, count), []
            if there and None in (there[0].sent, there[0].received):  # not in every round
                back = [there.pop()]

        def lead(step: Transfer) -> int:
            # So many elements are copied behind the digest. Both nodes decide alike: what one
            # sends, the other receives.
            parts = [part for part in (step.sent, step.received) if part is not None]
            longest = max(part.stop - part.start for part in parts)
            is_copied = 2 * longest < count and longest * dtype.itemsize <= COPIED_NBYTES
            return count if is_copied else EAGER_NBYTES // dtype.itemsize

        def prepared(steps: Sequence[Transfer]) -> list[_Leg]:
            return [_Leg(step, self._sent, self._received, dtype, lead(step)) for step in steps]

        return Legs(prepared(there), prepared(back))

    def compare(
        self, digest: bytes, same: bool, payload: Payload | None = None
    ) -> Generator[None, None, bool]:
        """Compares digests. Collective; yields while a message is missing."""
        # A rank without legs has no peers, and never comes here.
        legs = self._digests if payload is None or payload.legs is None else payload.legs
        mine = payload.load(payload) if payload is not None and same else None
        self._header[:DIGEST_NBYTES] = digest
        for leg in legs.there:
            same, mine = yield from self._exchange(leg, digest, same, mine)
            if leg.kept is not None and payload is not None and mine is not None:
                # After the last of these, all nodes have been heard.
                total = payload.result if leg.is_last else payload.partial
                mine = self._combine(payload, leg, mine, total)
        if mine is not None and payload is not None and payload.divisor > 1:
            divide(payload.result[legs.own], payload.divisor)
        for leg in legs.back:
            if not leg.is_mutual:
                same, mine = yield from self._exchange(leg, digest, same, mine)
                if leg.kept is not None and payload is not None and mine is not None:
                    np.copyto(payload.result, leg.incoming)
            elif payload is not None and mine is not None:
                for request in self._return(leg, payload.result):
                    yield from _finish(request)
        if payload is not None:
            payload.arrived = mine is not None
        return same

    def _exchange(
        self, leg: _Leg, digest: bytes, same: bool, mine: np.ndarray | None
    ) -> Generator[None, None, tuple[bool, np.ndarray | None]]:
        """Exchanges digests, and numbers while they are equal."""
        leaving = [] if leg.given is None else self._send(leg, same, mine)
        if leg.kept is not None:
            # After sending: what the other node waits for comes first.
            arriving, rest = self._world.Irecv(self._received, leg.peer, DIGEST), None
            if leg.expects_rest and mine is not None:
                rest = self._receive_rest(leg)
            if not arriving.Test():
                yield from _finish(arriving)
            state = self._answer[DIGEST_NBYTES]
            same = same and state != DIFFERENT and self._answer[:DIGEST_NBYTES] == digest
            if not same or state != COMPLETE:
                mine = None
            if self._rest_received[0]:  # also after a difference: it is on its way
                yield from _finish(rest or self._receive_rest(leg))
            elif rest is not None:
                rest.Cancel()
                yield from _finish(rest)
        for request in leaving:
            if not request.Test():
                yield from _finish(request)
        return same, mine

    def _receive_rest(self, leg: _Leg) -> Any:
        """Starts to receive what follows a message; a rank that differs may send more."""
        return self._world.Irecv(self._received[leg.rest_arrives_at :], leg.peer, REST)

    def _send(self, leg: _Leg, same: bool, mine: np.ndarray | None) -> list[Any]:
        """Starts to send a digest, and numbers while the digests are equal."""
        if mine is None:
            self._header[DIGEST_NBYTES] = SAME if same else DIFFERENT
            self._rest_sent[0] = 0
            return [self._world.Isend(leg.message[:HEADER_NBYTES], leg.peer, DIGEST)]
        self._header[DIGEST_NBYTES] = COMPLETE
        self._rest_sent[0] = leg.rest_nbytes
        np.copyto(leg.outgoing, mine[leg.lead])
        leaving = [self._world.Isend(leg.message, leg.peer, DIGEST)]
        if leg.rest_nbytes:
            rest = mine[leg.rest].view(BYTE)
            leaving.append(self._world.Isend(rest, leg.peer, REST))
        return leaving

    def _combine(
        self, payload: Payload, leg: _Leg, mine: np.ndarray, total: np.ndarray | None
    ) -> np.ndarray:
        """Adds what another node has sent; returns the array with the sum."""
        total = payload.result if total is None else total
        left, right = mine[leg.kept], leg.incoming
        if leg.peer < self._rank:
            left, right = right, left
        self._silently(combine_into, left, right, payload.op, total[leg.kept])
        return total

    def _return(self, leg: _Leg, result: np.ndarray) -> list[Any]:
        received, sent = result[leg.kept].view(np.uint8), result[leg.given].view(np.uint8)
        return [
            self._world.Irecv(received, leg.peer, HALF),
            self._world.Isend(sent, leg.peer, HALF),
        ]


def _message(memory: np.ndarray, part: slice, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    message = memory[: HEADER_NBYTES + (part.stop - part.start) * dtype.itemsize]
    return message, message[HEADER_NBYTES:].view(dtype)


def _finish(request: Any) -> Generator[None, None, None]:
    """Waits for a request; yields while it takes longer than a peer that is there."""
    for _ in range(SPINS):
        if request.Test():
            return
        os.sched_yield()  # to ranks of this host, which may be those it waits for
    while not request.Test():
        yield
