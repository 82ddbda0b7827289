"""The check before every collective: do all ranks bring the same digest?

Ranks of a node compare digests in shared memory. Nodes compare them in rounds, see
`keras_dist._engine.rounds`: a message says what the sender brings, and whether all that it has
heard of bring the same. Each rank of a node takes part in rounds with one rank of every other node,
so all know the answer at once. Where nodes have different numbers of ranks, some ranks have no such
peers and learn the answer on their node.

Numbers of a small bucket travel with the digest, see `Payload`.
"""

import os
import time
from collections.abc import Callable, Generator

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, combine
from keras_dist._engine.buckets import ALIGNMENT, aligned_array
from keras_dist._engine.mpi.topology import Topology
from keras_dist._engine.rounds import Round, rounds
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.wait import waiting

__all__ = ["MAX_PAYLOAD_NBYTES", "NAP_SECONDS", "SPIN_SECONDS", "DigestExchange", "Payload"]

SPIN_SECONDS = 100e-6  # polls of several communicators or of one peer: this long before they sleep
POLL_SECONDS = 1e-3  # polls of other nodes
NAP_SECONDS = 50e-6
MAX_PAYLOAD_NBYTES = 64 * 1024  # for larger buckets the number of bytes counts, not of messages
ROUND = 2  # MPI tag
HEADER_NBYTES = ALIGNMENT  # the digest, and whether all digests are equal so far
DIGEST_NBYTES = 16
SAME, DIFFERENT = b"digests agree ..", b"digests differ ."  # 16 bytes, as a digest


class Payload:
    """A small bucket that is reduced over the nodes while the ranks compare their digests.

    Args:
        count: number of elements.
        dtype: their dtype, that of sums as well.
        op: the reduction of two contributions.

    Attributes:
        numbers: the contribution of this node, then partial results.
        load: writes the contribution into `numbers`, once all ranks of this node are there.
        result: array that receives the result.
        arrived: whether the last exchange has reduced the numbers; the same on all ranks.
    """

    load: Callable[[], None]
    result: np.ndarray

    def __init__(self, count: int, dtype: np.dtype, op: ReduceOp):
        self.message = aligned_array(HEADER_NBYTES + count * dtype.itemsize, np.dtype(np.uint8))
        self.numbers = self.message[HEADER_NBYTES:].view(dtype)
        self._op = op
        self.arrived = False

    def receive(self, message: np.ndarray, is_first: bool, out: np.ndarray) -> None:
        """Adds the numbers of another node.

        Args:
            message: bytes from the other node.
            is_first: whether the other node comes first in the order of nodes.
            out: array that receives the sum: `numbers` or `result`.
        """
        theirs = self.numbers_of(message)
        left, right = (theirs, self.numbers) if is_first else (self.numbers, theirs)
        combine(left, right, self._op, out)

    def numbers_of(self, message: np.ndarray) -> np.ndarray:
        """Returns the numbers in a message of another node."""
        return message[HEADER_NBYTES : self.message.size].view(self.numbers.dtype)


class DigestExchange:
    """Compares digests of all ranks: in shared memory on one node, through MPI on several.

    Args:
        topology: the ranks.
        node: shared memory of the ranks of this node, if there is any.
        decline: called while this rank waits: answers ranks that wait for it elsewhere.
    """

    def __init__(self, topology: Topology, node: Node | None, decline: Callable[[], None]):
        self._node, self._decline = node, decline
        self._crosses = node is None or not topology.is_one_node
        # Without shared memory every rank takes part by itself.
        self._world = topology.world if node is None else topology.across
        self._has_peers = node is None or topology.has_slice
        self._answers_on_node = self._crosses and not (node is None or topology.is_homogeneous)
        one_each = len(topology.nodes) == topology.size
        #: whether a payload can travel with a digest
        self.carries = not topology.is_one_node and (
            one_each if node is None else topology.is_homogeneous
        )
        if self._world is not None and self._crosses and self._has_peers:
            self._rank = self._world.Get_rank()
            self._plan = rounds(self._rank, self._world.Get_size())
            self._sent = np.zeros(HEADER_NBYTES, np.uint8)
            # Ranks that differ may send more than is expected.
            longest = HEADER_NBYTES + MAX_PAYLOAD_NBYTES
            self._received = aligned_array(longest, np.dtype(np.uint8))
        self.count = 0  # exchanges so far; equal on all ranks

    def compare(self, digest: bytes, payload: Payload | None = None) -> bool:
        """Waits for all ranks and returns whether all brought the same digest. Collective; blocks.

        A rank polls for a while and then sleeps, so that a rank that still computes gets the core.

        Args:
            digest: 16 bytes.
            payload: numbers that are reduced if all bring the same digest. Defaults to none.

        Returns:
            The same answer on all ranks.
        """
        self.count += 1
        node = self._node
        same = node is None or node.meet(digest)
        if self._crosses and self._has_peers:
            with waiting:
                same = self._finish(self._rounds(digest, same, payload))
        if node is not None and self._answers_on_node:
            same = node.meet(self._answer(same)) and same
        return same

    def start(self, digest: bytes) -> Callable[[], bool | None]:
        """Starts `compare` without waiting. Collective.

        Args:
            digest: 16 bytes.

        Returns:
            Function that returns the answer of `compare`, or `None` while a rank is missing.
        """
        self.count += 1
        if not self._crosses and self._node is not None:
            return self._node.start(digest)
        steps = self._steps(digest)

        def answer() -> bool | None:
            try:
                next(steps)
            except StopIteration as stop:
                return bool(stop.value)
            self._decline()
            return None

        return answer

    def _steps(self, digest: bytes) -> Generator[None, None, bool]:
        """Compares without waiting: yields while a rank is missing."""
        node, same = self._node, True
        if node is not None:
            same = yield from _poll(node.start(digest))
        if self._has_peers:
            same = yield from self._rounds(digest, same, None)
        if node is not None and self._answers_on_node:
            agrees = yield from _poll(node.start(self._answer(same)))
            same = same and agrees
        return same

    def _answer(self, same: bool) -> bytes:
        """Returns what tells ranks of this node that have no peers the answer, as a digest.

        Those bring `SAME`, which differs from `DIFFERENT` of the others.
        """
        return SAME if same or not self._has_peers else DIFFERENT

    def _rounds(
        self, digest: bytes, same: bool, payload: Payload | None
    ) -> Generator[None, None, bool]:
        """Compares with other nodes: yields while a message is missing.

        Args:
            digest: 16 bytes.
            same: whether all ranks of this node bring this digest.
            payload: numbers that are reduced.
        """
        sent, received = self._sent, self._received
        if payload is not None:
            payload.arrived = False
            if same:
                payload.load()
                sent = payload.message
        header = sent[: DIGEST_NBYTES + 1].data
        header[:DIGEST_NBYTES] = digest
        for step in self._plan:
            header[DIGEST_NBYTES] = same
            requests = []
            if step.receives:
                requests.append(self._world.Irecv(received, step.peer, ROUND))
            if step.sends:
                # After a difference the numbers are of no use.
                message = sent if same else sent[:HEADER_NBYTES]
                requests.append(self._world.Isend(message, step.peer, ROUND))
            for request in requests:
                while not request.Test():
                    yield
            if step.receives:
                theirs = received[: DIGEST_NBYTES + 1].tobytes()
                same = same and theirs[:-1] == digest and theirs[-1] == 1
                if payload is not None and same:
                    self._combine(payload, step)
        if payload is not None:
            payload.arrived = same
            if same and not self._plan[-1].receives:
                payload.result[...] = payload.numbers
        return same

    def _combine(self, payload: Payload, step: Round) -> None:
        """Adds what another node has sent to the payload, or takes the result from it."""
        is_last = step is self._plan[-1]
        if is_last and not step.sends:
            payload.result[...] = payload.numbers_of(self._received)
        else:
            out = payload.result if is_last else payload.numbers
            payload.receive(self._received, step.peer < self._rank, out)

    def _finish(self, steps: Generator[None, None, bool]) -> bool:
        """Runs steps to their end."""
        start = time.perf_counter()
        try:
            while True:
                next(steps)
                waited = time.perf_counter() - start
                if waited > POLL_SECONDS:
                    self._decline()
                    time.sleep(NAP_SECONDS)
                else:
                    os.sched_yield()  # to ranks of this host, which may be those it waits for
        except StopIteration as stop:
            return bool(stop.value)


def _poll(answer: Callable[[], bool | None]) -> Generator[None, None, bool]:
    while (same := answer()) is None:
        yield
    return same
