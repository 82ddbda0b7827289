"""Times allreduce of float32 on the ranks of one node: keras_dist, the MPI library, a copy.

    python benchmarks/allreduce.py [--ranks 2 4] [--quick]

It starts its own ranks. Contenders take turns within one run and every number is a median, so
that what else the machine does falls on all of them alike.
"""

import statistics
from pathlib import Path

import numpy as np
from common import (
    MIB,
    answer,
    free_memory,
    last_line,
    library_calls,
    library_slug,
    load,
    machine,
    medians,
    options_of,
    parser,
    plotter,
    ratio,
    start,
    title,
    verdicts,
    write,
)

SIZES = [4 * 1024, 64 * 1024, MIB, 16 * MIB, 100 * MIB, 400 * MIB]
CONTENDERS = {
    "ours": "keras_dist",
    "as_it_comes": "MPI as it comes",
    "two_buffers": "MPI, two warm buffers",
    "in_place": "MPI, in place",
    "copy": "one copy",
}


def main():
    made = parser(__doc__, quick="fewer rounds, nothing over 100 MiB")
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    made.add_argument("--sizes", type=int, nargs="+", help="sizes in bytes")
    options = options_of(made, work)
    rounds = (3, 5) if options.quick else (7, 31)
    before = load()
    runs = {}
    for ranks in options.ranks:
        sizes = options.sizes or [n for n in SIZES if not options.quick or n <= 100 * MIB]
        fitting = [nbytes for nbytes in sizes if needed(nbytes, ranks) < free_memory()]
        for nbytes in sorted({*sizes} - {*fitting}):
            print(f"left out for want of memory: {title(nbytes)} on {ranks} ranks")
        runs[ranks] = start(__file__, ranks, {"sizes": fitting, "rounds": rounds})
    report(runs, before, options.output)


def needed(nbytes, ranks):
    """Returns how much memory all ranks need for a size: their buffers and the shared ones."""
    return ranks * nbytes * 6 + nbytes * (ranks + 4)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import json

    from mpi4py import MPI
    from turns import compare

    from keras_dist import _engine

    task = json.loads(Path(path).read_text())
    world = MPI.COMM_WORLD
    comm = _engine.Communicator(MPI, None)
    found = {
        "library": _engine.library.version(MPI),
        "sizes": {},
    }
    for nbytes in task["sizes"]:
        calls = prepare(MPI, comm, nbytes // 4)
        samples = compare(MPI, calls, task["rounds"])
        found["sizes"][nbytes] = samples
        del calls
    comm.free()
    if world.rank == 0:
        answer(path, found)


def prepare(MPI, comm, count):
    """Returns a function for each contender, after checking what it computes."""
    from keras_dist import _engine

    world = MPI.COMM_WORLD
    pattern = np.arange(count, dtype=np.float32) % 251
    expected = pattern * world.size + sum(range(world.size))
    mine = pattern + world.rank
    place, out, twin = mine.copy(), np.zeros_like(mine), np.zeros_like(mine)
    specs = [((count,), mine.dtype)]
    options = _engine.OpOptions(_engine.ReduceOp.SUM)
    plan = _engine.BucketOptions(mine.nbytes, lend=True)
    fused = _engine.FusedAllreduce(comm, ["a"], specs, options, plan)

    def copy():
        np.copyto(twin, mine)
        return twin

    calls = {
        "ours": lambda: fused([mine])[0],
        **library_calls(MPI, mine, place, out),
        "copy": copy,
    }
    for name, call in calls.items():
        for _ in range(1 if name == "in_place" else 3):
            right = np.array_equal(call(), mine if name == "copy" else expected)
            if not world.allreduce(right, MPI.LAND):
                raise SystemExit(f"{name} is wrong at {mine.nbytes} bytes")
    place.fill(0)  # or the sums would grow from call to call, to infinity
    return calls


# --- what came out ---------------------------------------------------------------------------


def report(runs, before, directory):
    text, rows = [], []
    library = next(iter(runs.values()))["library"].split(",")[0]
    text.append(f"# allreduce of float32\n\n{library}; {machine()}; {before}.")
    text.append("Medians, in milliseconds.")
    for ranks, run in runs.items():
        text.append(f"\n## {ranks} ranks\n")
        text.append(medians(run["sizes"], CONTENDERS))
        if ranks == 2:
            rows = judge({int(size): samples for size, samples in run["sizes"].items()})
    if rows:
        text.append("\n## Must reach, 2 ranks\n\n" + verdicts(rows))
    print("\n".join(text))
    slug = library_slug(library)
    write(directory, f"allreduce_{slug}", "\n".join([*text, "", last_line(rows)]))
    plot(runs, directory / f"allreduce_{slug}.png", library)
    print(last_line(rows))


def judge(sizes):
    """Returns the rows of what must be reached, for the sizes that were measured."""
    rows = []

    def faster(size, ours, other, bound, words):
        value = ratio(sizes[size][other], sizes[size][ours])
        what = f"{title(size)}, {CONTENDERS[ours]} against {words}"
        rows.append((what, f">= {bound} x faster", f"{value:.2f} x", value >= bound))

    def copies(size, ours, bound):
        value = ratio(sizes[size][ours], sizes[size]["copy"])
        what = f"{title(size)}, {CONTENDERS[ours]} against one copy by each rank"
        rows.append((what, f"<= {bound} x its time", f"{value:.2f} x", value <= bound))

    def best(size):
        """Returns the faster of the two prepared forms, by its median."""
        return min(("two_buffers", "in_place"), key=lambda c: statistics.median(sizes[size][c]))

    if 100 * MIB in sizes:
        faster(100 * MIB, "ours", "as_it_comes", 5, "MPI as it comes")
        faster(100 * MIB, "ours", best(100 * MIB), 2, "MPI best prepared")
        copies(100 * MIB, "ours", 2)
    if MIB in sizes:
        faster(MIB, "ours", best(MIB), 1.5, "MPI best prepared")
    if 64 * 1024 in sizes:
        faster(64 * 1024, "ours", best(64 * 1024), 1, "MPI best prepared")
    if 4096 in sizes:
        samples = sizes[4096]
        pairs = zip(samples["ours"], samples[best(4096)], strict=True)
        more = 1e6 * statistics.median(ours - theirs for ours, theirs in pairs)
        what = f"{title(4096)}, {CONTENDERS['ours']} beyond MPI best prepared"
        rows.append((what, "<= 25 us more", f"{more:+.1f} us", more <= 25))
    return rows


def plot(runs, path, library):
    pyplot = plotter()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, len(runs), figsize=(6 * len(runs), 4.5), squeeze=False)
    for axis, (ranks, run) in zip(axes[0], runs.items(), strict=True):
        sizes = [int(size) for size in run["sizes"]]
        for contender, label in CONTENDERS.items():
            times = [1e3 * statistics.median(s[contender]) for s in run["sizes"].values()]
            axis.plot(sizes, times, "--" if contender == "copy" else "-o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="milliseconds")
        axis.set_xticks(sizes, [title(size) for size in sizes], rotation=45)
        axis.minorticks_off()
        axis.set_title(f"{ranks} ranks, {library}")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
