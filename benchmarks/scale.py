"""Simulates allreduce between up to 10,000 nodes of 8 ranks, with the plans of the engine.

    python benchmarks/scale.py [--nodes 8 1024] [--quick] [--simulator /usr/bin/python3]

The engine itself runs once for each node, with a communicator that records the messages and sends
nothing: so who sends how much to whom, and in which order, is no copy. SimGrid simulates how long
the messages take (on Debian: apt-get install python3-simgrid). Only the network is simulated. The 8
ranks of a node send to the same nodes at the same time, so their messages are one flow.

A result of SimGrid is kept beside the tables, and used again for the same plan and network: a run
that was interrupted goes on where it was. Messages outside of reductions are counted on jobs of
this machine (messages.py), and for more ranks follow from the plans.
"""

import functools
import math
import os
import subprocess
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest import mock

import numpy as np
from common import conclude, options_of, parser, plotter, table
from messages import RANKS as COUNTED
from messages import count_messages
from services import COLLECTIVES, initialization, inquiry, judge_counted, messages_of_root
from simulator import Simulator

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.compression import Compression, wire_for
from keras_dist._engine.mpi import reduction
from keras_dist._engine.mpi.peers import DIGEST_NBYTES, HEADER_NBYTES, Peers
from keras_dist._engine.mpi.reduction import Combination, reduce_through_mpi
from keras_dist._engine.mpi.topology import Links, halving_nbytes

NODES = [1, 2, 8, 12, 64, 128, 1024, 4096, 10_000]
SIZES = {"4.8 MB": 4_800_000, "40 MB": 40_000_000, "102 MB": 102_000_000, "1 GB": 1_000_000_000}
GBITS = (25, 100)
RANKS = 8  # of a node
LEAF = 32  # nodes of a switch in the fat tree
NETWORKS = {"star": 0, "fat tree": LEAF}
LATENCY = 20e-6  # seconds until a message has arrived, without its bytes
MESSAGE = 2e-6  # seconds that each further message takes the sender
DTYPE = np.dtype(np.float32)
# Of a simulation of pieces; all are under way at once, and SimGrid takes up to 2 minutes.
MOST_MESSAGES = {"star": 170_000, "fat tree": 50_000}
# What must be reached: bytes, nodes, seconds; and how far the formula may be off.
BOUND = (4_800_000, 1024, 7e-3)
TOLERANCE = 0.1
# The network on which initialization and inquiries are simulated.
SERVICES = ("star", 25)


class Case(NamedTuple):
    """What is simulated.

    Args:
        network: name of the network.
        gbit: Gbit/s of a node.
        nodes: number of nodes.
        nbytes: size in bytes of the array; 0 for the comparison of digests before a reduction.
    """

    network: str
    gbit: int
    nodes: int
    nbytes: int


def main():
    made = parser(__doc__, quick="up to 12 nodes, and one size")
    made.add_argument("--nodes", type=int, nargs="+", help="numbers of nodes")
    made.add_argument("--simulator", default="/usr/bin/python3", help="a Python that has SimGrid")
    options = options_of(made, None)
    check = subprocess.run([options.simulator, "-c", "import simgrid"], capture_output=True)
    if check.returncode:
        made.error(
            f"argument --simulator: {options.simulator} cannot import simgrid; "
            "install it, on Debian with: apt-get install python3-simgrid"
        )
    simulator = Simulator(options.simulator, options.output / "scale.simulated")
    nodes = options.nodes or [n for n in NODES if not options.quick or n <= 12]
    sizes = list(SIZES.values())[: 1 if options.quick else None]
    cases = [
        Case(network, gbit, count, nbytes)
        for network in NETWORKS
        for gbit in GBITS
        for count in nodes
        for nbytes in [0, *sizes]
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        times = pool.map(functools.partial(simulated, simulator), cases)
        found = dict(zip(cases, times, strict=True))
        services = {
            count: [
                pool.submit(simulator, described(Case(*SERVICES, count, 0)), plan(count, RANKS))
                for plan in (initialization, inquiry)
            ]
            for count in nodes
        }
    counted = {} if options.quick else count_messages(COUNTED)
    report(found, nodes, sizes, services, counted, options.output)


# --- what the nodes send ---------------------------------------------------------------------
#
# A plan is a list of phases, a phase is a list of groups that are sent one after the other, and a
# group is a list of messages: sender, receiver, bytes.


class Recorder:
    """An MPI communicator of one node that records what it sends and receives.

    Nothing travels, and every request is done: the node does not need the others.

    Args:
        node: index of the node.
        nodes: number of nodes.

    Attributes:
        steps: what the node starts before it waits, step by step: messages that it sends, each with
            receiver, tag and bytes; and those that it receives, each with sender and tag.
    """

    def __init__(self, node, nodes):
        self._node, self._nodes = node, nodes
        self.steps, self._has_waited = [], True

    def Get_rank(self):
        return self._node

    def Get_size(self):
        return self._nodes

    def Isend(self, buffer, peer, tag):
        self._step()[0].append((peer, tag, buffer.nbytes))
        return self

    def Irecv(self, buffer, peer, tag):
        buffer[:HEADER_NBYTES] = 0  # no digest, and no numbers that follow it
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
    part = np.empty(slice_nbytes(case) // DTYPE.itemsize, DTYPE)  # of a rank; never touched
    sums = Silent(ReduceOp.SUM, 1, [[node] for node in range(case.nodes)])
    wire, links = wire_for(Compression.none, DTYPE, ""), links_of(case)
    worlds = [Recorder(node, case.nodes) for node in nodes]
    with RECORDING, mock.patch.object(reduction, "combine", lambda *_: None):
        for world in worlds:
            if case.nbytes:
                reduce_through_mpi(world, part, part, sums, wire, links)
            else:
                any(Peers(world).compare(bytes(DIGEST_NBYTES), True))
    return [world.steps for world in worlds]


def plan_of(case):
    """Returns the plan of an allreduce, or of the digests if there are no bytes."""
    return in_phases(recorded(case, range(case.nodes)), RANKS if case.nbytes else 1)


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


# --- which plan, and how long it takes -------------------------------------------------------


def byte_seconds(gbit):
    return 8e-9 / gbit


def slice_nbytes(case):
    """Returns the size in bytes of the slice that a rank of a node reduces."""
    return case.nbytes // (RANKS * DTYPE.itemsize) * DTYPE.itemsize


@functools.cache
def links_of(case):
    """Returns what the engine would know of the links."""
    return Links(halving_nbytes(case.nodes), 1 / byte_seconds(case.gbit))


def uses_halving(case):
    """Returns whether the engine halves an array recursively."""
    return case.nodes > 1 and 0 < slice_nbytes(case) <= links_of(case).halving_nbytes


@functools.cache
def of_first_node(case):
    """Returns how many messages node 0 sends, and in how many steps; for pieces, all do alike."""
    (steps,) = recorded(case, [0])
    return sum(len(sends) for sends, _ in steps), len(steps)


def simulated(simulator, case):
    """Returns seconds by SimGrid; `None` where there would be too many messages."""
    sends_pieces = case.nodes > 1 and case.nbytes and not uses_halving(case)
    if sends_pieces and case.nodes * of_first_node(case)[0] > MOST_MESSAGES[case.network]:
        return None
    return simulator(described(case), plan_of(case))


def described(case):
    """Returns a network as network.py builds it."""
    return {
        "nodes": case.nodes,
        "leaf": NETWORKS[case.network],
        "byte": byte_seconds(case.gbit),
        "latency": LATENCY,
        "message": MESSAGE,
    }


def formula(case):
    """Returns the seconds of the alpha-beta model: latencies, messages, bytes."""
    nodes, nbytes = case.nodes, case.nbytes
    if nodes == 1:
        return 0.0
    steps = int(math.log2(nodes))
    whole, folds = 2**steps, 2**steps < nodes
    byte, leaf = byte_seconds(case.gbit), NETWORKS[case.network]
    exchanges = steps + 2 * folds
    if not nbytes:
        return exchanges * LATENCY
    if uses_halving(case):
        times = 2 * (1 - 1 / whole) + 2 * folds
        if leaf:  # of what leaves a switch, twice as many bytes share each link
            times += max(0.0, 2 * ((1 + folds) / leaf - 1 / whole))
        return 2 * (steps + folds) * LATENCY + times * nbytes * byte
    messages, phases = of_first_node(case)
    times = 1 - 1 / nodes
    if leaf:
        times = max(times, 2 * (1 - leaf / nodes))
    return phases * LATENCY + max(messages * MESSAGE, 2 * times * nbytes * byte)


# --- what came out ---------------------------------------------------------------------------


def report(found, nodes, sizes, services, counted, directory):
    names = {nbytes: name for name, nbytes in SIZES.items()}
    text = [
        "# Allreduce between many nodes, simulated",
        "",
        "Milliseconds by SimGrid, then by the formula; h: halved recursively. In brackets: by the "
        "formula alone, because there are too many messages to simulate.",
    ]
    for network in NETWORKS:
        for gbit in GBITS:
            rows = [
                [
                    f"{count * RANKS:,}",
                    f"{count:,}",
                    *(cell(found, Case(network, gbit, count, nbytes)) for nbytes in [0, *sizes]),
                ]
                for count in nodes
            ]
            head = ["ranks", "nodes", "agreement", *(names[nbytes] for nbytes in sizes)]
            text += ["", f"**{network.capitalize()}, {gbit} Gbit/s**", "", table(head, rows)]
    text += ["", *outside_of_reductions(services), "", *messages_of_root(counted, RANKS)]
    (directory / "scale.svg").unlink(missing_ok=True)  # it would be of another run
    if pyplot := plotter():
        draw(pyplot, found, nodes, sizes, names, directory)
    conclude(directory, "scale", text, verdict_rows(found) + judge_counted(counted))


def outside_of_reductions(services):
    """Returns the lines of the table of initialization and inquiries."""
    network, gbit = SERVICES
    rows = [
        [
            f"{count * RANKS:,}",
            f"{count:,}",
            f"{1e3 * COLLECTIVES * times[0].result():.2f}",
            f"{1e3 * times[1].result():.2f}",
        ]
        for count, times in services.items()
    ]
    head = ["ranks", "nodes", "`keras_dist.init`", "an inquiry of the stall watchdog or of `top`"]
    return [f"**Outside of reductions, {network}, {gbit} Gbit/s**", "", table(head, rows)]


def cell(found, case):
    seconds, modelled = found[case], f"{formula(case) * 1e3:.2f}"
    if seconds == 0:
        return "0"
    text = f"({modelled})" if seconds is None else f"{seconds * 1e3:.2f} / {modelled}"
    return f"{text} h" if uses_halving(case) else text


def verdict_rows(found):
    known = {case: seconds for case, seconds in found.items() if seconds}
    worst = max(abs(formula(case) / seconds - 1) for case, seconds in known.items())
    rows = [
        (
            f"the formula, against {len(known)} simulations",
            f"<= {TOLERANCE:.0%} off",
            f"{worst:.1%}",
            worst <= TOLERANCE,
        )
    ]
    nbytes, nodes, bound = BOUND
    for network in NETWORKS:
        for gbit in GBITS:
            if (seconds := found.get(Case(network, gbit, nodes, nbytes))) is not None:
                what = f"4.8 MB on {nodes * RANKS:,} ranks, {network}, {gbit} Gbit/s"
                measured = f"{seconds * 1e3:.2f} ms"
                rows.append((what, f"<= {bound * 1e3:.0f} ms", measured, seconds <= bound))
    return rows


def draw(pyplot, found, nodes, sizes, names, directory):
    """Draws the times by number of nodes: points are simulated, lines the formula."""
    # Text remains text, and equal results are equal files.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scale"})
    figure, axes = pyplot.subplots(1, len(GBITS), figsize=(9, 4), sharey=True)
    counts = [count for count in nodes if count > 1]
    for axis, gbit in zip(axes, GBITS, strict=True):
        for colour, nbytes in enumerate(sizes):
            for network, mark in zip(NETWORKS, "ox", strict=True):
                style = {"color": f"C{colour}", "linestyle": "-" if mark == "o" else ":"}
                modelled = [formula(Case(network, gbit, c, nbytes)) * 1e3 for c in counts]
                axis.plot(counts, modelled, linewidth=1, **style)
                points = [found[Case(network, gbit, c, nbytes)] for c in counts]
                shown = [(c, s * 1e3) for c, s in zip(counts, points, strict=True) if s]
                label = f"{names[nbytes]}, {network}"
                times = [time for _, time in shown]
                axis.plot([c for c, _ in shown], times, mark, color=f"C{colour}", label=label)
        axis.set(xscale="log", yscale="log", xlabel="nodes of 8 ranks", title=f"{gbit} Gbit/s")
    axes[0].set_ylabel("ms")
    axes[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    path = directory / "scale.svg"
    figure.savefig(path, metadata={"Date": None})
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
