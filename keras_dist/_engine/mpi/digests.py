"""The check before every collective: do all ranks bring the same digest?

Ranks of a node compare digests in shared memory, nodes by messages, see `Peers`. Each rank of a
node has one peer on every other node, so all know the answer at once. Where nodes have different
numbers of ranks, some ranks have no peers and learn the answer on their node.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from keras_dist._engine.mpi.peers import Payload, Peers
from keras_dist._engine.mpi.topology import Topology
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.wait import noted, waiting

SPIN_SECONDS = 100e-6  # polls of several communicators or of one peer: this long before they sleep
POLL_SECONDS = 1e-3  # polls of other nodes
NAP_SECONDS = 50e-6
SAME, DIFFERENT = b"digests agree ..", b"digests differ ."  # 16 bytes, as a digest


HELLO = 1  # MPI tag; messages of collectives have tag 0


@dataclasses.dataclass(frozen=True)
class Hello:
    """What one of two ranks tells the other."""

    rank: int
    call: Any
    dtype: np.dtype | None = None
    goes: bool = True


def decline(world: Any, rank: int) -> None:
    """Declines the greetings of ranks that wait for this one in `send` or `recv`."""
    # One that waits for this rank cannot come to the rendezvous of all ranks to which this one has
    # come, so neither would ever continue.
    while (message := world.improbe(tag=HELLO)) is not None:
        hello = message.recv()
        world.send(Hello(rank, str(noted()), goes=False), hello.rank, HELLO)


class DigestExchange:
    """Compares digests of all ranks: in shared memory on one node, through MPI on several."""

    def __init__(self, topology: Topology, node: Node | None, decline: Callable[[], None]):
        self._node, self._decline = node, decline
        self._crosses = node is None or not topology.is_one_node
        self._has_peers = node is None or topology.has_slice
        self._answers_on_node = self._crosses and not (node is None or topology.is_homogeneous)
        one_each = len(topology.nodes) == topology.size
        #: whether a payload can travel with a digest
        self.carries = not topology.is_one_node and (node is not None or one_each)
        if topology.world is not None and self._crosses and self._has_peers:
            # Without shared memory every rank takes part by itself.
            self.peers = Peers(topology.world if node is None else topology.across)
        self.count = 0  # exchanges so far; equal on all ranks
        #: compares digests, uncounted, where all ranks share the memory of one node
        self.on_node = None if node is None or self._crosses else node.barrier

    def compare(self, digest: bytes, payload: Payload | None = None) -> bool:
        """Waits for all ranks; returns whether all brought the same digest. Collective; blocks."""
        self.count += 1
        node = self._node
        same = node is None or node.barrier(digest)
        if self._crosses and self._has_peers:
            with waiting:
                same = self._finish(self.peers.compare(digest, same, payload))
        elif payload is not None and same:
            # This rank has no slice: it only chooses the memory of the next result, as the others
            # of its node do. That cannot fail; no other node would hear of it.
            payload.load(payload)
        if node is None:
            return same
        if payload is not None and payload.is_slice:
            return self._barrier_for_slices(node, same, payload)
        if self._answers_on_node:
            same = node.barrier(self._answer(same)) and same
        return same

    def _barrier_for_slices(self, node: Node, same: bool, payload: Payload) -> bool:
        """Waits for the slices of all ranks of this node, unless a rank differs."""
        if not (same or self._answers_on_node):
            return False  # known to all ranks of all nodes
        done = payload.arrived or not self._has_peers
        payload.arrived = node.barrier(SAME if done else DIFFERENT) and done
        return payload.arrived

    def start(self, digest: bytes) -> Callable[[], bool | None]:
        """Starts `compare`; returns a function of its answer, `None` until then. Collective."""
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
            same = yield from self.peers.compare(digest, same)
        if node is not None and self._answers_on_node:
            agrees = yield from _poll(node.start(self._answer(same)))
            same = same and agrees
        return same

    def _answer(self, same: bool) -> bytes:
        """Returns what ranks without peers, which bring `SAME`, take as the answer: a digest."""
        return SAME if same or not self._has_peers else DIFFERENT

    def _finish(self, steps: Generator[None, None, bool]) -> bool:
        start = time.perf_counter()
        try:
            while True:
                next(steps)
                waited = time.perf_counter() - start
                if waited > POLL_SECONDS:
                    self._decline()
                    time.sleep(NAP_SECONDS)
                else:
                    os.sched_yield()
        except StopIteration as stop:
            return bool(stop.value)


def _poll(answer: Callable[[], bool | None]) -> Generator[None, None, bool]:
    while (same := answer()) is None:
        yield
    return same
