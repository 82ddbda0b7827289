"""Simulates allreduce between up to 2,048 nodes of 8 ranks, with the plans of the engine.

    python benchmarks/scale.py [--nodes 8 512] [--quick] [--simulator /usr/bin/python3]

The engine itself runs once for each node, with a communicator that records the messages and sends
nothing: so who sends how much to whom, and in which order, is no copy. SimGrid simulates how long
the messages take (on Debian: apt-get install python3-simgrid). Only the network is simulated. The 8
ranks of a node send to the same nodes at the same time, so their messages are one flow. A ring of
the nodes, and what MPICH selects, are simulated on the same networks.

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
from plans import (
    MPICH,
    OWN,
    PLANS,
    RANKS,
    RING,
    Case,
    agrees_before,
    byte_seconds,
    exchanged,
    of_first_node,
    plan_of,
    way,
)
from services import COLLECTIVES, initialization, inquiry, judge_counted, messages_of_root
from simulator import Simulator

NODES = [1, 2, 8, 12, 32, 128, 512, 1500, 2048]
KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = {"4 KiB": 4 * KIB, "256 KiB": 256 * KIB, "4 MiB": 4 * MIB, "64 MiB": 64 * MIB, "1 GiB": GIB}
DRAWN = (4 * KIB, 4 * MIB, GIB)
GBITS = (25, 100, 400)
LEAF = 32  # nodes of a switch in the fat tree
NETWORKS = {"star": 0, "fat tree": LEAF}
LATENCY = 20e-6  # seconds until a message has arrived, without its bytes
MESSAGE = 2e-6  # seconds that each further message takes the sender
# Of a simulation of pieces; all are under way at once, and SimGrid takes up to 2 minutes.
MOST_MESSAGES = {"star": 170_000, "fat tree": 50_000}
# What must be reached: bytes, nodes, seconds; and how far the formula may be off.
BOUND = (4 * MIB, 2048, 7e-3)
TOLERANCE = 0.1
# The network on which initialization and inquiries are simulated.
SERVICES = ("star", 25)


def main():
    made = parser(__doc__, quick="up to 12 nodes, and two sizes")
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
    sizes = list(SIZES.values())[: 2 if options.quick else None]
    cases = [
        Case(network, gbit, count, nbytes, plan)
        for count in nodes
        for nbytes in [0, *sizes]
        for gbit in GBITS
        for network in NETWORKS
        for plan in (PLANS if nbytes else (OWN,))
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


# --- how long it takes ------------------------------------------------------------------------


def simulated(simulator, case):
    """Returns seconds by SimGrid; `None` where there would be too many messages."""
    sends_pieces = case.plan == OWN and case.nodes > 1 and case.nbytes and way(case) == "pieces"
    if sends_pieces and case.nodes * of_first_node(case)[0] > MOST_MESSAGES[case.network]:
        return None
    times = 2 * (case.nodes - 1) if case.plan == RING else 1
    seconds = times * simulator(described(case), plan_of(case))
    if agrees_before(case):
        seconds += simulated(simulator, case._replace(nbytes=0))
    return seconds


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
    if case.plan == RING:
        return 2 * (nodes - 1) * (LATENCY + nbytes / nodes * byte)
    exchanges = steps + 2 * folds
    if not nbytes:
        return exchanges * LATENCY
    agreement = exchanges * LATENCY if agrees_before(case) else 0
    if case.plan == OWN and way(case) == "whole":
        # Of what leaves a switch, twice as many bytes share each link.
        twice = max(0, steps - int(math.log2(leaf))) if leaf else 0
        return exchanges * LATENCY + (exchanges + twice) * RANKS * exchanged(case).nbytes * byte
    if case.plan == MPICH or way(case) == "halves":
        times = 2 * (1 - 1 / whole) + 2 * folds
        if leaf:
            times += max(0.0, 2 * ((1 + folds) / leaf - 1 / whole))
        return agreement + 2 * (steps + folds) * LATENCY + times * nbytes * byte
    messages, phases = of_first_node(case)
    times = 1 - 1 / nodes
    if leaf:
        times = max(times, 2 * (1 - leaf / nodes))
    return agreement + phases * LATENCY + max(messages * MESSAGE, 2 * times * nbytes * byte)


def holds(case):
    """Returns whether the formula has all that is shared: no flow takes the link of another."""
    uneven = case.nodes & (case.nodes - 1)  # pairs of nodes then do not end where a switch does
    is_whole = case.plan == OWN and case.nbytes and way(case) == "whole"
    return not (is_whole and uneven and case.network == "fat tree")


# --- what came out ---------------------------------------------------------------------------


def report(found, nodes, sizes, services, counted, directory):
    names = {nbytes: name for name, nbytes in SIZES.items()}
    text = [
        "# Allreduce between many nodes, simulated",
        "",
        "Milliseconds of keras_dist / of a ring / of MPICH's selection. w: nodes exchange whole "
        "arrays, h: they halve them, p: they exchange pieces. In brackets: by the formula, because "
        "there are too many messages to simulate.",
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
    """Returns the milliseconds of each plan, and how the engine exchanges the array."""
    if case.nodes == 1:
        return "0"
    if not case.nbytes:
        return milliseconds(found, case)
    times = " / ".join(milliseconds(found, case._replace(plan=plan)) for plan in PLANS)
    return f"{times} {way(case)[0]}"


def milliseconds(found, case):
    """Returns the time of a case as text, with three digits; in brackets by the formula."""
    seconds = found[case]
    time = (formula(case) if seconds is None else seconds) * 1e3
    text = f"{time:.{max(0, 2 - int(math.log10(time)))}f}" if time >= 1 else f"{time:.2f}"
    return f"({text})" if seconds is None else text


def verdict_rows(found):
    known = {case: seconds for case, seconds in found.items() if seconds and holds(case)}
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
                what = f"4 MiB on {nodes * RANKS:,} ranks, {network}, {gbit} Gbit/s"
                measured = f"{seconds * 1e3:.2f} ms"
                rows.append((what, f"<= {bound * 1e3:.0f} ms", measured, seconds <= bound))
    return rows


def draw(pyplot, found, nodes, sizes, names, directory):
    """Draws the times on the star by number of ranks: points are simulated, lines the formula."""
    # Text remains text, and equal results are equal files.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scale"})
    figure, axes = pyplot.subplots(1, len(GBITS), figsize=(11, 4), sharey=True)
    counts = [count for count in nodes if count > 1]
    for axis, gbit in zip(axes, GBITS, strict=True):
        for colour, nbytes in enumerate(size for size in sizes if size in DRAWN):
            for plan, line, mark in zip(PLANS, ["-", "--", ":"], "ox+", strict=True):
                cases = [Case("star", gbit, count, nbytes, plan) for count in counts]
                ranks, style = [RANKS * count for count in counts], {"color": f"C{colour}"}
                times = [formula(case) * 1e3 for case in cases]
                axis.plot(ranks, times, linewidth=1, linestyle=line, **style)
                shown = [(c.nodes * RANKS, found[c] * 1e3) for c in cases if found[c]]
                points = ([x for x, _ in shown], [y for _, y in shown])
                axis.plot(*points, mark, markersize=4, label=f"{names[nbytes]}, {plan}", **style)
        axis.set(xscale="log", yscale="log", xlabel="ranks", title=f"{gbit} Gbit/s")
    axes[0].set_ylabel("ms")
    axes[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    path = directory / "scale.svg"
    figure.savefig(path, metadata={"Date": None})
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
