"""The tables on the pages: which command measures each, and which code it measures.

A table stands on its page between two lines:

    <!-- table: jax-calls -->
    <!-- end table -->

`benchmarks/all jax-calls` runs its command and writes the text between them, with commit, date and
machine in the first line, and copies its figure to the pages. `tests/house/test_tables.py` fails
where the measured code has changed more than a release later.
"""

import dataclasses
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PERFORMANCE = "docs/performance.md"

ENGINE = ("keras_dist/_engine",)
CALLS = (*ENGINE, "keras_dist/ops")
TRAINING = (*CALLS, "keras_dist/training", "keras_dist/runtime/startup.py")
BACKENDS = ("tensorflow", "jax", "torch")


def backend(name):
    """Returns the code of a backend."""
    sources = (ROOT / "keras_dist/_backends").glob(f"{name}*.py")
    return tuple(str(path.relative_to(ROOT)) for path in sorted(sources))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table on a page.

    Args:
        command: the script in `benchmarks`, with its arguments.
        result: the file in `benchmarks/results` that the command writes, without `.md`.
        measures: files and folders of the measured code, from the root of the repository.
        library: the MPI library that it is measured with. Defaults to "MPICH".
        page: the page. Defaults to `docs/performance.md`.
        figures: paths of the figures of the table, from the root of the repository. The command
            draws them in `benchmarks/results`, under the same names. Defaults to none.
    """

    command: str
    result: str
    measures: tuple[str, ...]
    library: str = "MPICH"
    page: str = PERFORMANCE
    figures: tuple[str, ...] = ()

    @property
    def sources(self):
        """The measured code and the script that measures it."""
        return (f"benchmarks/{self.command.split()[0]}", *self.measures)


def fit(name, script="fit"):
    """Returns a table of `fit` with a backend."""
    command, result = f"{script}.py --backend {name}", f"{script}_{name}_mpich"
    return Table(command, result, (*TRAINING, "keras_dist/callbacks", *backend(name)))


def shard_state(name):
    """Returns the table of sharded optimizer state with a backend."""
    command, result = f"shard_state.py --quick --backend {name}", f"shard_state_{name}_mpich"
    return Table(command, result, (*TRAINING, *backend(name)))


def fit_hosts(model):
    """Returns a table of `fit` on two hosts, with each backend."""
    command, result = f"fit_hosts.py --gbit 2.5 --models {model}", f"fit_hosts_{model}_mpich"
    sources = (*TRAINING, *(path for name in BACKENDS for path in backend(name)))
    return Table(command, result, sources)


def calls(face, *measures):
    """Returns a table of what scripts call with a face."""
    return Table(f"calls.py --faces {face}", f"calls_{face}_mpich", (*CALLS, *measures))


def restart(name, options=""):
    """Returns a table of restarts with a backend."""
    command, result = f"restart.py --rounds 3 --backend {name}{options}", f"restart_{name}_mpich"
    return Table(command, result, ("keras_dist/launch", "keras_dist/monitor/imports.py"))


TABLES = {
    "allreduce-mpich": Table("allreduce.py", "allreduce_mpich", CALLS),
    "allreduce-openmpi": Table("allreduce.py", "allreduce_openmpi", CALLS, "Open MPI"),
    "calls-numpy": calls("numpy"),
    "calls-torch": calls("torch", "keras_dist/torch"),
    "calls-tensorflow": calls("tensorflow", "keras_dist/tensorflow"),
    "calls-jax": calls("jax", "keras_dist/jax"),
    "hosts-mpich": Table("hosts.py", "hosts_mpich", CALLS),
    "hosts-openmpi": Table("hosts.py --ranks 1", "hosts_openmpi", CALLS, "Open MPI"),
    "fit-tensorflow": fit("tensorflow"),
    "fit-torch": fit("torch"),
    "fit-jax": fit("jax"),
    "losses": Table(
        "losses.py",
        "losses_mpich",
        (
            "keras_dist/_compat/keras/losses.py",
            "keras_dist/training/global_losses.py",
            *CALLS,
            *(path for name in BACKENDS for path in backend(name)),
        ),
    ),
    "speed": Table("speed.py", "speed", TRAINING),
    "picture": Table(
        "picture.py",
        "picture",
        (*TRAINING, *(path for name in BACKENDS for path in backend(name))),
        figures=("docs/images/picture-light.svg", "docs/images/picture-dark.svg"),
    ),
    "fit-ranks-tensorflow": fit("tensorflow", "fit_ranks"),
    "fit-ranks-torch": fit("torch", "fit_ranks"),
    "fit-ranks-jax": fit("jax", "fit_ranks"),
    "loops-tensorflow": Table(
        "loops.py", "loops_tensorflow_mpich", (*CALLS, "keras_dist/tensorflow")
    ),
    "loops-torch": Table("torch_loops.py", "loops_torch_mpich", (*CALLS, "keras_dist/torch")),
    "rows": Table("rows.py", "rows_mpich", ENGINE),
    "jax-calls": Table("jax_calls.py", "jax_calls_mpich", (*CALLS, "keras_dist/jax")),
    "launching-mpich": Table("launching.py", "launching_mpich", ("keras_dist/launch",)),
    "launching-openmpi": Table(
        "launching.py", "launching_openmpi", ("keras_dist/launch",), "Open MPI"
    ),
    "start": Table("start.py", "start_mpich", (*TRAINING, "keras_dist/callbacks")),
    "restart-torch": restart("torch", " --hosts"),
    "restart-tensorflow": restart("tensorflow"),
    "shard-state-tensorflow": shard_state("tensorflow"),
    "shard-state-jax": shard_state("jax"),
    "shard-state-torch": shard_state("torch"),
    "checkpoint": Table(
        "checkpoint.py",
        "checkpoint_tensorflow_mpich",
        ("keras_dist/resume", "keras_dist/callbacks/backup.py"),
    ),
    "watching": Table("watching.py", "watching", ("keras_dist/monitor",)),
    "timeline": Table("timeline.py", "timeline_tensorflow_mpich", ("keras_dist/_engine/tracing",)),
    "fit-hosts-mlp": fit_hosts("mlp"),
    "fit-hosts-cnn": fit_hosts("cnn"),
    "fit-hosts-recommender": fit_hosts("recommender"),
    "messages": Table(
        "messages.py",
        "messages",
        (
            "keras_dist/_engine/sideband.py",
            "keras_dist/monitor/collector.py",
            "keras_dist/runtime/startup.py",
        ),
        page="docs/scale.md",
    ),
    "scale": Table(
        "scale.py",
        "scale",
        (
            "keras_dist/_engine/sideband.py",
            "keras_dist/_engine/collectives/cross_node.py",
            *(f"keras_dist/_engine/mpi/{name}.py" for name in ("peers", "reduction", "topology")),
            "benchmarks/network.py",
            "benchmarks/plans.py",
            "benchmarks/services.py",
        ),
        page="docs/scale.md",
        figures=("docs/images/scale.svg",),
    ),
}

MEASURED = r"Commit (?P<commit>\w+), (?P<date>\S+), (?P<machine>.*?)\.\n"
MARKED = re.compile(
    rf"<!-- table: (?P<name>\S+) -->\n\n{MEASURED}(?P<text>.*?)<!-- end table -->\n", re.DOTALL
)


def find(text):
    """Returns the match of each table on a page, by its name."""
    return {match["name"]: match for match in MARKED.finditer(text)}


def mark(name, commit, date, machine, text):
    """Returns a table between its marks."""
    measured = f"Commit {commit}, {date}, {machine}."
    return f"<!-- table: {name} -->\n\n{measured}\n\n{text.strip()}\n\n<!-- end table -->\n"


def copy_figures(table, results, root=ROOT):
    """Copies the figures of a table to the pages.

    Args:
        table: the table.
        results: folder of the results.
        root: folder of the repository. Defaults to this one.

    Raises:
        SystemExit: the command has not drawn a figure.
    """
    for figure in table.figures:
        drawn = results / Path(figure).name
        if not drawn.exists():
            raise SystemExit(f"no figure {drawn}: install matplotlib, and run the command again")
        shutil.copyfile(drawn, root / figure)


def on_page(result):
    """Returns the text of a result as it stands on a page: headings become bold, the title goes."""
    lines = result.strip().splitlines()
    if lines[0].startswith("# "):
        del lines[0]
    return "\n".join(re.sub(r"^## (.*)$", r"**\1**", line) for line in lines).strip() + "\n"


def replace(page, name, marked):
    """Returns a page with a table in the place of the one with the same name.

    Raises:
        SystemExit: the page has no such table.
    """
    place = re.compile(rf"<!-- table: {name} -->\n.*?<!-- end table -->\n", re.DOTALL)
    if not place.search(page):
        raise SystemExit(f"no table {name} on the page: add its two marks where it should stand")
    return place.sub(lambda _: marked, page, count=1)
