"""What the benchmarks share: options, starting ranks, saying what came out."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).with_name("results")
MIB = 2**20


def launcher():
    """Returns the mpiexec beside this Python, with what it needs to run anywhere."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        mpiexec = Path("mpiexec")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version:
        # It would refuse to run as root and to start more ranks than there are cores.
        return [str(mpiexec), "--allow-run-as-root", "--oversubscribe"]
    return [str(mpiexec)]


def mpi():
    """Returns the name of the MPI library whose mpiexec starts the ranks."""
    return "Open MPI" if "--oversubscribe" in launcher() else "MPICH"


def start(script, ranks, task, timeout=None, options=(), **variables):
    """Runs a script's worker on some ranks and returns what its rank 0 found.

    Args:
        script: path of the script; it is started with `--worker` and a file's path.
        ranks: how many; 0 for one process without a launcher.
        task: what the worker should do, as JSON can hold it.
        timeout: seconds after which the ranks are killed. Defaults to `None`: never.
        options: further options of mpiexec. Defaults to none.
        **variables: environment variables of the ranks.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "task.json"
        path.write_text(json.dumps(task))
        prefix = [*launcher(), *options, "-n", str(ranks)] if ranks else []
        subprocess.run(
            [*prefix, sys.executable, str(script), "--worker", str(path)],
            stdin=subprocess.DEVNULL,
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **variables},
            check=True,
            timeout=timeout,
        )
        return json.loads(path.with_suffix(".out").read_text())


def answer(path, found):
    """Hands what rank 0 found to `start`."""
    Path(path).with_suffix(".out").write_text(json.dumps(found))


def ratio(numerators, denominators):
    """Returns the median of the ratios of two lists of numbers, round by round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def library_calls(MPI, mine, place, out):
    """Returns the ways to call `Allreduce` of the MPI library, by name.

    Args:
        MPI: mpi4py's `MPI` module.
        mine: contribution of this rank.
        place: array that the call in place reduces.
        out: array for the result of the other call with warm buffers.
    """
    world = MPI.COMM_WORLD

    def as_it_comes():
        fresh = np.empty_like(mine)
        world.Allreduce(mine, fresh)
        return fresh

    def two_buffers():
        world.Allreduce(mine, out)
        return out

    def in_place():
        world.Allreduce(MPI.IN_PLACE, place)
        return place

    return {"as_it_comes": as_it_comes, "two_buffers": two_buffers, "in_place": in_place}


def title(nbytes):
    """Returns a size in bytes in words."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes / 1024:g} KiB"


def medians(sizes, contenders):
    """Returns a table of medians in milliseconds.

    Args:
        sizes: by size in bytes, the samples of each contender.
        contenders: titles of the contenders by name.
    """
    body = [
        [
            title(int(size)),
            *(f"{1e3 * statistics.median(samples[name]):.3f}" for name in contenders),
        ]
        for size, samples in sizes.items()
    ]
    return table(["size", *contenders.values()], body)


def library_slug(library):
    """Returns the name of an MPI library for files, from its version in words."""
    return "openmpi" if library.startswith("Open MPI") else library.split()[0].lower()


def machine():
    """Describes this machine in one line."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores {model}, {platform.system()} {platform.release().split('-')[0]}"


def load():
    """Returns how busy the machine was in the last minute; ask before ranks are started."""
    return f"{os.getloadavg()[0]:.1f} processes were running before the start"


def free_memory():
    """Returns how many bytes of memory and of /dev/shm are free, whichever is less."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not os.path.isdir("/dev/shm"):
        return memory
    room = os.statvfs("/dev/shm")
    return min(memory, room.f_bavail * room.f_frsize)


def table(head, rows):
    """Returns a Markdown table whose columns are aligned, so that it also reads as text."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row):
        first, *others = [*zip(row, widths, strict=True)]
        texts = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        return f"| {' | '.join(texts)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), line(rule), *(line(row) for row in cells[1:])])


def parser(doc, quick="fewer rounds and steps"):
    """Returns a parser of the options that all benchmarks have; `--worker` is what `start` adds.

    Args:
        doc: of the benchmark, whose first line is the description.
        quick: what `--quick` means.
    """
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


def options_of(made, work):
    """Returns the options; a rank that `start` has started does its work instead and ends.

    Args:
        made: a `parser`, with the options of a benchmark's own.
        work: what a rank does, of the path of its task.
    """
    options = made.parse_args()
    if options.worker:
        work(options.worker)
        sys.exit()
    make_folder(made, options.output)
    return options


def make_folder(parser, directory):
    """Makes the folder of the results before anything is measured, or ends with why it cannot."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        parser.error(f"argument --output: no results can be written to {directory}: {error}")


def surroundings(before):
    """Returns the line that says where it was measured; `before` is what `load` returned."""
    return f"\n{mpi()}; {machine()}; {before}.\n"


def conclude(directory, name, text, rows):
    """Prints and keeps what came out, and prints the line that ends a benchmark.

    Args:
        directory: folder of the results.
        name: of the file, without the library and the ending.
        text: lines of Markdown.
        rows: as for `verdicts`.
    """
    text = [*text, "\n## Must reach\n\n" + verdicts(rows)]
    print("\n".join(text))
    write(directory, name, "\n".join([*text, "", last_line(rows)]))
    print(last_line(rows))


def slug(name):
    """Returns a name with that of the MPI library behind it, for files."""
    return f"{name}_{mpi().replace(' ', '').lower()}"


def verdicts(rows):
    """Returns a table of what must be reached, and whether it was.

    Args:
        rows: what, the bound in words, the measured value in words, whether it holds.
    """
    return table(
        ["must reach", "bound", "measured", ""],
        [(*row[:3], "passed" if row[3] else "missed") for row in rows],
    )


def last_line(rows):
    """Returns the line that ends a benchmark."""
    return f"passed {sum(bool(row[3]) for row in rows)} of {len(rows)}"


def write(directory, name, text):
    """Writes a Markdown file among the results and says where."""
    path = directory / f"{name}.md"
    path.write_text(text + "\n")
    print(f"\nwritten: {path}")


def plotter():
    """Returns matplotlib's pyplot without a window, or `None` and a line that says so."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is missing (pip install 'keras_dist[benchmarks]')")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
