"""The plan that benchmarks/scale.py simulates is what the engine sends."""

import importlib
import itertools
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import thread_ranks

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.compression import Compression, Wire
from keras_dist._engine.mpi.peers import Payload, Peers
from keras_dist._engine.mpi.reduction import Combination, reduce_through_mpi

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def plans(monkeypatch):
    """What makes the plans; the benchmark's modules have common names, and are removed."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("plans")
    ours = {path.stem for path in FOLDER.glob("*.py")}
    for name in ours & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def messages(monkeypatch):
    """By sender, receiver and tag, the bytes that threads in the place of nodes have sent."""
    sent, lock, send = {}, threading.Lock(), thread_ranks.Rank.Isend

    def recording(self, buffer, peer, tag):
        with lock:
            sent.setdefault((self.rank, peer, tag), []).append(buffer.nbytes)
        return send(self, buffer, peer, tag)

    monkeypatch.setattr(thread_ranks.Rank, "Isend", recording)
    return sent


@pytest.mark.parametrize("nbytes", [0, 4096, 262_144, 4_800_000, 4_800_064, 40_000_000])
@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 12])
def test_nodes_send_what_is_simulated(plans, messages, nodes, nbytes):
    case = plans.Case("star", 25, nodes, nbytes)  # without bytes nodes compare digests alone
    sums = Combination(ReduceOp.SUM, 1, [[node] for node in range(nodes)])
    wire, exchanged = Wire(Compression.none, plans.DTYPE, ""), plans.exchanged(case)
    rows = [np.full(exchanged.nbytes // 4, node, "f4") for node in range(nodes)]

    def reduce(world):
        row, compared = rows[world.rank], Peers(world)
        if not nbytes:
            return any(compared.compare(bytes(16), True))
        if not exchanged.travels:
            return reduce_through_mpi(world, row, row, sums, wire, plans.are_slow(case))
        legs = compared.legs(row.size, row.dtype)
        payload = Payload(legs, ReduceOp.SUM, 1, lambda _: row.copy(), row)
        return any(compared.compare(bytes(16), True, payload))

    thread_ranks.Network(nodes).run(reduce)
    assert (rows[0] == sum(range(nodes))).all()
    recorded = {}
    for node, steps in enumerate(plans.recorded(case, range(nodes))):
        for peer, tag, size in itertools.chain(*(sends for sends, _ in steps)):
            recorded.setdefault((node, peer, tag), []).append(size)
    assert recorded == messages
    simulated = [m for phase in plans.plan_of(case) for group in phase for m in group]
    times = 8 if nbytes else 1  # the ranks of a node
    assert sorted(simulated) == sorted(
        (sender, receiver, times * size)
        for (sender, receiver, _), sizes in messages.items()
        for size in sizes
    )


def test_pieces_are_sent_one_after_the_other_and_two_are_under_way(plans):
    plan = plans.plan_of(plans.Case("star", 25, 8, 1_000_000_000))
    # A phase has the results of a piece, and the contributions to the one after the next.
    assert [len(phase) for phase in plan] == [14] * (len(plan) - 2) + [7, 7]
    assert all(sorted(m[0] for m in group) == [*range(8)] for phase in plan for group in phase)
