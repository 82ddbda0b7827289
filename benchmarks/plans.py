"""What nodes send in an allreduce: the plan of the engine, of a ring, and of MPICH's selection.

A plan is a list of phases, a phase is a list of groups that are sent one after the other, and a
group is a list of messages: sender, receiver, bytes. That of the engine is recorded from its code.
In a ring of the nodes, each sends a part to the next, 2 (nodes - 1) times. MPICH, above 2 KiB,
halves whole arrays as the engine halves slices; one rank takes part for each node.
"""

import functools
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.buckets import Bucket
from keras_dist._engine.collectives.cross_node import CrossNodeReduction
from keras_dist._engine.compression import Compression, Wire
from keras_dist._engine.mpi import peers
from keras_dist._engine.mpi.peers import (
    COMPLETE,
    DIGEST,
    DIGEST_NBYTES,
    HALF,
    HEADER_NBYTES,
    Peers,
    halving,
)
from keras_dist._engine.mpi.reduction import Combination, reduce_through_mpi
from keras_dist._engine.mpi.topology import SLOW, halving_nbytes

RANKS = 8  # of a node
OWN, RING, MPICH = PLANS = ("keras_dist", "ring", "MPICH")
FASTEST = 400  # Gbit/s; a plan depends on slow links alone
DTYPE = np.dtype(np.float32)


class Case(NamedTuple):
    """What is simulated.

    Args:
        network: name of the network.
        gbit: Gbit/s of a node.
        nodes: number of nodes.
        nbytes: size in bytes of the array; 0 for the comparison of digests before a reduction.
        plan: who sends what to whom, one of `PLANS`. Defaults to that of the engine.
    """

    network: str
    gbit: int
    nodes: int
    nbytes: int
    plan: str = OWN


def byte_seconds(gbit):
    return 8e-9 / gbit


class Exchanged(NamedTuple):
    """What a rank of a node exchanges with its peers: bytes, and whether with the digests."""

    nbytes: int
    travels: bool


@functools.cache
def exchanged(case):
    """Returns what the engine exchanges: a slice of the array, or all of a small one."""
    comm = SimpleNamespace(
        is_one_node=False,
        reduction="ordered",
        halving_nbytes=halving_nbytes(case.nodes),
        node=object(),
        topology=SimpleNamespace(is_homogeneous=True, slices=RANKS),
        digests=SimpleNamespace(carries=True),
    )
    buckets = [Bucket(DTYPE, (), case.nbytes // DTYPE.itemsize)]
    crossing = CrossNodeReduction(comm, buckets, ReduceOp.SUM, Compression.none)
    return Exchanged(crossing._largest_slice(0), crossing.travels(0))


def agrees_before(case):
    """Returns whether nodes compare digests before they exchange the array."""
    return case.plan == OWN and case.nbytes > 0 and not exchanged(case).travels


def are_slow(case):
    """Returns what the engine would know of the links."""
    return 1 / byte_seconds(case.gbit) < SLOW


def way(case):
    """Returns how nodes exchange numbers: "whole" arrays, by "halves", or in "pieces"."""
    nbytes, travels = exchanged(case)
    if travels and nbytes <= peers.MAX_PAYLOAD_NBYTES:
        return "whole"
    return "halves" if nbytes <= halving_nbytes(case.nodes) else "pieces"


@functools.cache
def of_first_node(case):
    """Returns how many messages node 0 sends, and in how many steps; for pieces, all do alike."""
    (steps,) = recorded(case, [0])
    return sum(len(sends) for sends, _ in steps), len(steps)


class Recorder:
    """An MPI communicator of one node that records what it sends and receives.

    Nothing travels, and every request is done: the node does not need the others.

    Args:
        node: index of the node.
        nodes: number of nodes.

    Attributes:
        steps: what the node starts before it waits, step by step: messages that it sends, each with
            receiver, tag and bytes; and those that it receives, each with sender and tag.
        followed: of the digests that it receives in turn, whether more numbers follow.
    """

    def __init__(self, node, nodes):
        self._node, self._nodes = node, nodes
        self.steps, self.followed, self._has_waited = [], [], True

    def Get_rank(self):
        return self._node

    def Get_size(self):
        return self._nodes

    def Isend(self, buffer, peer, tag):
        self._step()[0].append((peer, tag, buffer.nbytes))
        return self

    def Irecv(self, buffer, peer, tag):
        if tag == DIGEST:  # an equal one, with numbers
            buffer[:HEADER_NBYTES] = 0
            buffer[DIGEST_NBYTES] = COMPLETE
            buffer[HEADER_NBYTES - 8] = bool(self.followed) and self.followed.pop(0)
        self._step()[1].append((peer, tag))
        return self

    def Test(self):
        self._has_waited = True
        return True

    def _step(self):
        if self._has_waited:
            self.steps.append(([], []))
            self._has_waited = False
        return self.steps[-1]


class Silent(Combination):
    """Computes nothing: no numbers have arrived."""

    def reduce_into(self, result, numbers):
        pass


RECORDING = threading.Lock()  # a plan is made by one thread, in which halving computes nothing


def recorded(case, nodes):
    """Returns the steps of some nodes; see `Recorder`."""
    if case.nodes == 1:
        return [[] for _ in nodes]
    worlds = [Recorder(node, case.nodes) for node in nodes]
    with (
        RECORDING,
        mock.patch.object(peers, "combine_into", lambda *_: None),
    ):
        for node, world in zip(nodes, worlds, strict=True):
            if case.plan == MPICH:
                exchange_halves(world, node, case)
            else:
                reduce(world, case)
    return [world.steps for world in worlds]


def exchange_halves(world, node, case):
    """Halves an array until each node has one segment; the results take the same way back."""
    there = halving(node, case.nodes, case.nbytes // DTYPE.itemsize)
    part = np.empty(case.nbytes // DTYPE.itemsize, DTYPE)
    for step in [*there, *(step.reverse for step in reversed(there))]:
        requests = []
        if step.received is not None:
            requests.append(world.Irecv(part[step.received], step.peer, HALF))
        if step.sent is not None:
            requests.append(world.Isend(part[step.sent], step.peer, HALF))
        for request in requests:
            request.Test()


def reduce(world, case):
    """Runs the reduction of a rank of a node, or the comparison of digests, or both in one."""
    part = np.empty(exchanged(case).nbytes // DTYPE.itemsize, DTYPE)
    if case.nbytes and not exchanged(case).travels:
        sums = Silent(ReduceOp.SUM, 1, [[node] for node in range(case.nodes)])
        wire = Wire(Compression.none, DTYPE, "")
        reduce_through_mpi(world, part, part, sums, wire, are_slow(case))
        return
    compared, payload = Peers(world), None
    if case.nbytes:
        legs = compared.legs(part.size, DTYPE)
        world.followed = [leg.expects_rest for leg in legs.there if leg.kept is not None]
        payload = peers.Payload(legs, ReduceOp.SUM, 1, lambda _: part, part)
    any(compared.compare(bytes(DIGEST_NBYTES), True, payload))


@functools.lru_cache(maxsize=8)
def _plan(case):
    if case.plan == RING:  # one of its 2 (nodes - 1) equal phases
        ring = range(case.nodes if case.nodes > 1 else 0)
        return [[[(node, (node + 1) % case.nodes, -(-case.nbytes // case.nodes)) for node in ring]]]
    flows = RANKS if case.nbytes and case.plan == OWN else 1
    return in_phases(recorded(case, range(case.nodes)), flows)


def plan_of(case):
    """Returns the plan of an allreduce, or of the digests if there are no bytes.

    That of the engine has the digests only if the array travels with them.
    """
    fastest = case.gbit if are_slow(case) else FASTEST  # all others have one plan
    return _plan(case._replace(network="star", gbit=fastest))


def in_phases(plans, flows=1):
    """Returns the phases in which the messages of all nodes travel.

    A message travels once its sender and its receiver have come to it, and a node goes on once all
    messages of its step have travelled.

    Args:
        plans: steps of each node; see `Recorder`.
        flows: number of equal messages that are one flow.
    """
    places, missing = [0] * len(plans), [0] * len(plans)
    sent, expected = defaultdict(list), defaultdict(int)
    ready = [node for node, steps in enumerate(plans) if steps]
    phases = []
    while ready:
        channels = {}
        for node in ready:
            sends, receives = plans[node][places[node]]
            missing[node] = len(sends) + len(receives)
            for number, (peer, tag, nbytes) in enumerate(sends):
                channels[node, peer, tag] = None
                sent[node, peer, tag].append((number, nbytes * flows))
            for peer, tag in receives:
                channels[peer, node, tag] = None
                expected[peer, node, tag] += 1
        groups, changed = defaultdict(list), set()
        for channel in channels:
            sender, receiver, _ = channel
            while sent[channel] and expected[channel]:
                number, nbytes = sent[channel].pop(0)
                expected[channel] -= 1
                groups[number].append((sender, receiver, nbytes))
                missing[sender] -= 1
                missing[receiver] -= 1
                changed |= {sender, receiver}
        phases.append([groups[number] for number in sorted(groups)])
        done = sorted(node for node in changed if not missing[node])
        for node in done:
            places[node] += 1
        ready = [node for node in done if places[node] < len(plans[node])]
    if any(missing):
        raise SystemExit("the plans of the nodes do not match: a node would wait for ever")
    return phases
