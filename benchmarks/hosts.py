"""Times allreduce of float32 between hosts: keras_dist, the MPI library, gloo, plain sockets.

    python benchmarks/hosts.py [--hosts 2 3] [--ranks 1 2] [--quick]
    python benchmarks/hosts.py --resume     # goes on after an interrupted run
    KERAS_DIST_REDUCTION=library python benchmarks/hosts.py

The hosts are network namespaces of this machine, see scripts/hosts: root is needed. Contenders
take turns within one run and every number is a median, so that what else the machine does falls on
all of them alike.
"""

import json
import os
import socket
import statistics
import threading
from pathlib import Path

import numpy as np
from common import (
    MIB,
    answer,
    last_line,
    library_calls,
    library_slug,
    load,
    machine,
    medians,
    options_of,
    parser,
    ratio,
    slug,
    title,
    verdicts,
    write,
)
from host_jobs import Unavailable, start_on_hosts

SIZES = [4 * 1024, 64 * 1024, MIB, 16 * MIB, 100 * MIB]
CONTENDERS = {
    "ours": "keras_dist.allreduce",
    "as_it_comes": "MPI as it comes",
    "two_buffers": "MPI, two warm buffers",
    "in_place": "MPI, in place",
    "gloo": "torch, gloo",
    "sockets": "plain sockets",
}
LIBRARY = ("as_it_comes", "two_buffers", "in_place")
PORTS = {"gloo": 29717, "sockets": 29718}
# By size in bytes: how long the public call may take, in times of the library's best.
BOUNDS = {4 * 1024: 2, 64 * 1024: 1.3, MIB: 1, 16 * MIB: 1, 100 * MIB: 1}


def main():
    made = parser(__doc__, quick="fewer rounds, nothing over 16 MiB")
    made.add_argument("--hosts", type=int, nargs="+", default=[2, 3], help="numbers of hosts")
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks on each host")
    made.add_argument("--sizes", type=int, nargs="+", help="sizes in bytes")
    made.add_argument(
        "--resume", action="store_true", help="measure only what an earlier run lacks"
    )
    options = options_of(made, work)
    sizes = options.sizes or [n for n in SIZES if not options.quick or n <= 16 * MIB]
    task = {"sizes": sizes, "rounds": (3, 5) if options.quick else (7, 31)}
    before = load()
    kept = options.output / f"{slug('hosts')}.json"
    known = json.loads(kept.read_text()) if options.resume and kept.exists() else {}
    runs = {}
    for hosts in options.hosts:
        for ranks in options.ranks:
            # Another reduction, other sizes or rounds are another measurement.
            key = json.dumps([hosts, ranks, task, os.environ.get("KERAS_DIST_REDUCTION")])
            if key not in known:
                try:
                    known[key] = start_on_hosts(__file__, hosts, ranks, task)
                except Unavailable as error:
                    made.error(f"no test hosts: {error}")
                kept.write_text(json.dumps(known))
            runs[hosts, ranks] = known[key]
    report(runs, before, options.output)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    from mpi4py import MPI
    from turns import compare

    from keras_dist import _engine

    task = json.loads(Path(path).read_text())
    world = MPI.COMM_WORLD
    gloo, peer = connect_gloo(world, task["first"]), connect_peer(world, task["first"])
    found = {"library": _engine.library.version(MPI), "sizes": {}}
    for nbytes in task["sizes"]:
        calls = prepare(MPI, nbytes // 4, gloo, peer)
        found["sizes"][nbytes] = compare(MPI, calls, task["rounds"])
    if world.rank == 0:
        answer(path, found)


def connect_gloo(world, first):
    """Returns torch.distributed over gloo; `None` without torch."""
    try:
        import torch
        import torch.distributed as distributed
    except ImportError:
        return None
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{first}:{PORTS['gloo']}",
        rank=world.rank,
        world_size=world.size,
    )
    return distributed


def connect_peer(world, first):
    """Returns a TCP connection of two ranks; `None` for more."""
    if world.size != 2:
        return None
    if world.rank == 0:
        with socket.create_server(("", PORTS["sockets"])) as server:
            world.Barrier()
            peer, _ = server.accept()
    else:
        world.Barrier()
        peer = socket.create_connection((first, PORTS["sockets"]))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def prepare(MPI, count, gloo, peer):
    """Returns a function for each contender, after checking what it computes."""
    import keras_dist

    world = MPI.COMM_WORLD
    pattern = np.arange(count, dtype=np.float32) % 251
    expected = pattern * world.size + sum(range(world.size))
    mine = pattern + world.rank
    out, place = np.zeros_like(mine), np.zeros_like(mine)

    calls = {
        "ours": lambda: keras_dist.allreduce(mine, "sum"),
        **library_calls(MPI, mine, place, out),
    }
    if gloo is not None:
        import torch

        tensor = torch.from_numpy(place)

        def through_gloo():
            gloo.all_reduce(tensor)
            return place

        calls["gloo"] = through_gloo
    if peer is not None:
        calls["sockets"] = lambda: exchange(peer, mine, out)
    for name, call in calls.items():
        place[...] = mine  # of calls in place
        right = np.array_equal(call(), pattern + 1 - world.rank if name == "sockets" else expected)
        if not world.allreduce(right, MPI.LAND):
            raise SystemExit(f"{name} is wrong at {mine.nbytes} bytes")
    place.fill(0)  # or the sums would grow from call to call, to infinity
    return calls


def exchange(peer, mine, theirs):
    """Sends as many bytes as an allreduce of two ranks does, and receives as many at once."""
    sender = threading.Thread(target=peer.sendall, args=(mine.data.cast("B"),))
    sender.start()
    rest = theirs.data.cast("B")
    while rest:
        rest = rest[peer.recv_into(rest) :]
    sender.join()
    return theirs


# --- what came out ---------------------------------------------------------------------------


def report(runs, before, directory):
    library = next(iter(runs.values()))["library"].split(",")[0]
    text = [f"# allreduce of float32 between hosts\n\n{library}; {machine()}; {before}."]
    reduction = os.environ.get("KERAS_DIST_REDUCTION", "ordered")
    text[0] += "" if reduction == "ordered" else f" KERAS_DIST_REDUCTION={reduction}."
    text.append("Medians, in milliseconds.")
    rows = []
    for (hosts, ranks), run in runs.items():
        sizes = {int(size): samples for size, samples in run["sizes"].items()}
        measured = next(iter(sizes.values()))
        contenders = {name: words for name, words in CONTENDERS.items() if name in measured}
        heading = f"{hosts} hosts, {ranks} rank{'s' * (ranks > 1)} on each"
        text.append(f"\n## {heading}\n")
        text.append(medians(sizes, contenders))
        rows += judge(heading, sizes)
    text.append("\n## Must reach\n\n" + verdicts(rows))
    print("\n".join(text))
    name = f"hosts_{library_slug(library)}"
    if reduction != "ordered":
        name += f"_{reduction}"
    write(directory, name, "\n".join([*text, "", last_line(rows)]))
    print(last_line(rows))


def judge(heading, sizes):
    """Returns the rows of what must be reached on these hosts."""
    rows = []

    def at_most(size, other, bound, words):
        value = ratio(sizes[size]["ours"], sizes[size][other])
        what = f"{heading}, {title(size)}, against {words}"
        rows.append((what, f"<= {bound} x its time", f"{value:.2f} x", value <= bound))

    for size, samples in sizes.items():
        if size in BOUNDS:
            best = min(LIBRARY, key=lambda name: statistics.median(samples[name]))
            at_most(size, best, BOUNDS[size], "MPI best prepared")
        if size >= 16 * MIB and "gloo" in samples:
            at_most(size, "gloo", 1, CONTENDERS["gloo"])
        if size >= 16 * MIB and "sockets" in samples:
            at_most(size, "sockets", 1.4, CONTENDERS["sockets"])
    return rows


if __name__ == "__main__":
    main()
