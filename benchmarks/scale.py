"""Simulates allreduce between up to 10,000 nodes of 8 ranks, with the plans of the engine.

    python benchmarks/scale.py [--nodes 8 1024] [--quick] [--simulator /usr/bin/python3]

Who sends how much to whom, and in which order, comes from the modules that the engine runs (rounds,
pieces, the choice between them); SimGrid simulates how long that takes (on Debian: apt-get install
python3-simgrid). Only the network is simulated. The 8 ranks of a node send to the same nodes at the
same time, so their messages are one flow.

A result of SimGrid is kept beside the tables, and used again for the same plan and network: a run
that was interrupted goes on where it was. Messages outside of reductions are counted on jobs of
this machine (messages.py), and for more ranks follow from the plans.
"""

import functools
import math
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

from common import conclude, options_of, parser, plotter, table
from messages import RANKS as COUNTED
from messages import count_messages
from services import COLLECTIVES, initialization, inquiry, judge_counted, messages_of_root
from simulator import Simulator

from keras_dist._engine.mpi.halving import crossover
from keras_dist._engine.pieces import Pieces, piece_nbytes
from keras_dist._engine.rounds import Exchange, halving, rounds

NODES = [1, 2, 8, 12, 64, 128, 1024, 4096, 10_000]
SIZES = {"4.8 MB": 4_800_000, "40 MB": 40_000_000, "102 MB": 102_000_000, "1 GB": 1_000_000_000}
GBITS = (25, 100)
RANKS = 8  # of a node
LEAF = 32  # nodes of a switch in the fat tree
NETWORKS = {"star": 0, "fat tree": LEAF}
LATENCY = 20e-6  # seconds until a message has arrived, without its bytes
MESSAGE = 2e-6  # seconds that each further message takes the sender
DIGEST_NBYTES = 64
ITEM_NBYTES = 4
MOST_MESSAGES = 150_000  # of a simulation; SimGrid takes about a minute
# What must be reached: bytes, nodes, seconds; and how far the formula may be off.
BOUND = (4_800_000, 1024, 7e-3)
TOLERANCE = 0.1
# The network on which initialization and inquiries are simulated.
SERVICES = ("star", 25)


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
        (network, gbit, count, nbytes)
        for network in NETWORKS
        for gbit in GBITS
        for count in nodes
        for nbytes in [0, *sizes]  # 0: the digests
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        times = pool.map(functools.partial(simulated, simulator), *zip(*cases, strict=True))
        found = dict(zip(cases, times, strict=True))
        services = {
            count: [
                pool.submit(simulator, described(*SERVICES, count), plan(count, RANKS))
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


def byte_seconds(gbit):
    return 8e-9 / gbit


def uses_halving(nodes, gbit, nbytes):
    """Returns whether the engine halves an array recursively between these nodes."""
    # Each rank of a node reduces a slice, and all of them share the network of the node.
    limit = crossover(nodes, LATENCY, MESSAGE, RANKS * byte_seconds(gbit))
    return nodes > 1 and nbytes // RANKS <= limit


def plan_of(nodes, gbit, nbytes):
    """Returns the plan of an allreduce, or of the digests if there are no bytes."""
    if not nbytes:
        return digests(nodes)
    count = nbytes // RANKS // ITEM_NBYTES
    return by_halves(nodes, count) if uses_halving(nodes, gbit, nbytes) else by_pieces(nodes, count)


def digests(nodes):
    whole = slice(0, DIGEST_NBYTES)
    plans = [
        [Exchange(r.peer, whole if r.sends else None, whole if r.receives else None) for r in plan]
        for plan in (rounds(node, nodes) for node in range(nodes))
    ]
    return in_phases(plans, 1)


def by_halves(nodes, count):
    halves = [halving(node, nodes, count) for node in range(nodes)]
    back = [[exchange.reverse for exchange in reversed(plan)] for plan in halves]
    return in_phases(halves, RANKS * ITEM_NBYTES) + in_phases(back, RANKS * ITEM_NBYTES)


def in_phases(plans, item_nbytes):
    """Returns the phases of exchanges that wait for both nodes."""
    places, phases = [0] * len(plans), []
    waiting = [node for node, plan in enumerate(plans) if plan]
    while waiting:
        now = {node: plans[node][places[node]] for node in waiting}
        ready = [n for n, step in now.items() if step.peer in now and now[step.peer].peer == n]
        messages = [
            (n, now[n].peer, (now[n].sent.stop - now[n].sent.start) * item_nbytes)
            for n in ready
            if now[n].sent is not None
        ]
        phases.append([messages])
        for node in ready:
            places[node] += 1
        waiting = [node for node in waiting if places[node] < len(plans[node])]
    return phases


def by_pieces(nodes, count):
    """Returns phases in which results of one piece travel beside contributions of a later one."""
    step = piece_nbytes(nodes, count * ITEM_NBYTES) // ITEM_NBYTES
    plans = [Pieces(node, nodes, count, step) for node in range(nodes)]
    total = plans[0].count

    def messages(number, place, results):
        found = []
        for node, plan in enumerate(plans):
            peer = plan.receivers[place]
            part = plan.part(number, node if results else peer)
            if part.stop > part.start:
                found.append((node, peer, (part.stop - part.start) * ITEM_NBYTES * RANKS))
        return found

    def groups(number, results):
        inside = 0 <= number < total
        return [messages(number, p, results) for p in range(nodes - 1)] if inside else []

    if nodes == 1:
        return []
    first = groups(0, False) + groups(1, False)
    return [first] + [groups(n, True) + groups(n + 2, False) for n in range(total)]


# --- how long that takes ---------------------------------------------------------------------


def simulated(simulator, network, gbit, nodes, nbytes):
    """Returns seconds by SimGrid; `None` where there would be too many messages."""
    sends_pieces = nbytes and not uses_halving(nodes, gbit, nbytes)
    if sends_pieces and 2 * nodes * (nodes - 1) * pieces_of_segment(nodes, nbytes) > MOST_MESSAGES:
        return None
    return simulator(described(network, gbit, nodes), plan_of(nodes, gbit, nbytes))


def pieces_of_segment(nodes, nbytes):
    """Returns the number of pieces of a segment of the slice that a rank reduces."""
    count = nbytes // RANKS // ITEM_NBYTES
    return Pieces(0, nodes, count, piece_nbytes(nodes, count * ITEM_NBYTES) // ITEM_NBYTES).count


def described(network, gbit, nodes):
    """Returns a network as network.py builds it."""
    return {
        "nodes": nodes,
        "leaf": NETWORKS[network],
        "byte": byte_seconds(gbit),
        "latency": LATENCY,
        "message": MESSAGE,
    }


def formula(network, gbit, nodes, nbytes):
    """Returns the seconds of the alpha-beta model: latencies, messages, bytes."""
    if nodes == 1:
        return 0.0
    steps = int(math.log2(nodes))
    whole, folds = 2**steps, 2**steps < nodes
    byte, leaf = byte_seconds(gbit), NETWORKS[network]
    exchanges = steps + 2 * folds
    if not nbytes:
        return exchanges * LATENCY
    if uses_halving(nodes, gbit, nbytes):
        times = 2 * (1 - 1 / whole) + 2 * folds
        if leaf:  # of what leaves a switch, twice as many bytes share each link
            times += max(0.0, 2 * ((1 + folds) / leaf - 1 / whole))
        return 2 * (steps + folds) * LATENCY + times * nbytes * byte
    pieces = pieces_of_segment(nodes, nbytes)
    times = 1 - 1 / nodes
    if leaf:
        times = max(times, 2 * (1 - leaf / nodes))
    sending = 2 * pieces * (nodes - 1) * MESSAGE
    return (pieces + 1) * LATENCY + max(sending, 2 * times * nbytes * byte)


# --- what came out ---------------------------------------------------------------------------


def report(found, nodes, sizes, services, counted, directory):
    names = {nbytes: name for name, nbytes in SIZES.items()}
    text = [
        "# Allreduce between many nodes, simulated",
        "",
        "Milliseconds by SimGrid, then by the formula; h: halved recursively. A dash: too many "
        "messages to simulate.",
    ]
    for network in NETWORKS:
        for gbit in GBITS:
            rows = [
                [
                    f"{count * RANKS:,}",
                    f"{count:,}",
                    *(cell(found, (network, gbit, count, nbytes)) for nbytes in [0, *sizes]),
                ]
                for count in nodes
            ]
            head = ["ranks", "nodes", "agreement", *(names[nbytes] for nbytes in sizes)]
            text += ["", f"**{network.capitalize()}, {gbit} Gbit/s**", "", table(head, rows)]
    text += ["", *outside_of_reductions(services), "", *messages_of_root(counted, RANKS)]
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
    seconds, modelled = found[case], formula(*case)
    if seconds == 0:
        return "0"
    mark = " h" if case[3] and uses_halving(*case[1:]) else ""
    simulated_text = "-" if seconds is None else f"{seconds * 1e3:.2f}"
    return f"{simulated_text} / {modelled * 1e3:.2f}{mark}"


def verdict_rows(found):
    known = {case: seconds for case, seconds in found.items() if seconds}
    worst = max(abs(formula(*case) / seconds - 1) for case, seconds in known.items())
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
            if (seconds := found.get((network, gbit, nodes, nbytes))) is not None:
                what = f"4.8 MB on {nodes * RANKS:,} ranks, {network}, {gbit} Gbit/s"
                measured = f"{seconds * 1e3:.2f} ms"
                rows.append((what, f"<= {bound * 1e3:.0f} ms", measured, seconds <= bound))
    return rows


def draw(pyplot, found, nodes, sizes, names, directory):
    """Draws the times by number of nodes: points are simulated, lines the formula."""
    pyplot.rcParams["svg.fonttype"] = "none"  # text remains text
    figure, axes = pyplot.subplots(1, len(GBITS), figsize=(9, 4), sharey=True)
    counts = [count for count in nodes if count > 1]
    for axis, gbit in zip(axes, GBITS, strict=True):
        for colour, nbytes in enumerate(sizes):
            for network, mark in zip(NETWORKS, "ox", strict=True):
                style = {"color": f"C{colour}", "linestyle": "-" if mark == "o" else ":"}
                modelled = [formula(network, gbit, count, nbytes) * 1e3 for count in counts]
                axis.plot(counts, modelled, linewidth=1, **style)
                points = [found[network, gbit, count, nbytes] for count in counts]
                shown = [(c, s * 1e3) for c, s in zip(counts, points, strict=True) if s]
                label = f"{names[nbytes]}, {network}"
                axis.plot(*zip(*shown, strict=True), mark, color=f"C{colour}", label=label)
        axis.set(xscale="log", yscale="log", xlabel="nodes of 8 ranks", title=f"{gbit} Gbit/s")
    axes[0].set_ylabel("ms")
    axes[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    path = directory / "scale.svg"
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
