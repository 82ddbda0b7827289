"""The rules of the house, held by reading the sources of keras_dist.

Each rule is a function that takes a module's syntax tree and its dotted name, and yields the
line and the text of every violation. Each is shown to find a planted one.
"""

import ast
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Who may import whom. Own rooms begin with a dot, and `.room.*` is the room with everything in
# it; `.room` alone is its face. The last column may be imported inside functions only, so that
# it costs nothing until it is used. The first row that fits counts.
ENGINE = "numpy .config .errors ._engine.*"
ON_KERAS = (
    "keras numpy .runtime .bucket_size .built_optimizers ._backends ._engine .config .errors "
    ".launcher "
    ".callbacks .collectives .distributed .layers .model_state .optimizer .process_sets .reduce_op "
    ".loss_scales .reduction .replicas .update_check "
    ".fit_plan .gradient_plans .keeping.* .saved_terms .terms "
    ".trainer .whole_files"
)
DATA = (
    "numpy .runtime .collectives .errors "
    ".data .data.agreement .data.arrays .data.batches .data.block_batches .data.blocks "
    ".data.decoding .data.epochs .data.fetching .data.files .data.image_labels .data.indexed "
    ".data.kinds .data.nested .data.order .data.partition .data.paths .data.piece_batches "
    ".data.piece_source .data.pieces .data.readers .data.row_source .data.samples .data.segments "
    ".data.streams .data.survey .data.terms .data.whole_pieces"
)
DOCUMENTS = "IPython nbformat traitlets"
BESIDE = ".timeline.recording .watching.attend"
SETS = "numpy ._engine .errors .process_sets"
TF = "tensorflow numpy .errors ._backends.tensorflow_host ._backends.tensorflow_step"
TORCH = "torch numpy ._backends.torch_tensors"
FACE = "numpy .runtime ._backends ._engine .errors"
LOOPS = (
    f"{ON_KERAS} .gradient_plans .arguments .builds .compression .optimizer .telling "
    ".tensor_compression .timeline.control"
)
BY_HAND = (
    ".arguments .asynchronous .builds .collectives .compression .gradient_plans .process_sets "
    ".reduce_op .telling .tensor_compression .terms .timeline.control"
)
TABLE = [
    # room                     may import                                     inside functions
    (".",                      ".ending .launcher ._version",                         ".*"),
    ("._version",              "",                                            ""),
    (".errors",                "",                                            ""),
    (".config",                ".errors",                                     ""),
    (".launcher",              ".errors",                                     ""),
    (".whole_files",           "",                                            ""),
    (".tensor_compression",    ".compression",                                ""),
    (".telling",               "._engine .errors .runtime",                   ""),
    (".ownership",             "",                                            ""),
    (".rank_log",              "",                                            ""),
    (".interactive.view",      ".interactive.exchange",               "IPython rich"),
    (".interactive.launch", "cloudpickle .errors .launcher .cli.job .cli.hosts .interactive.*", ""),
    (".interactive.rank", "cloudpickle .errors .launcher .rank_log .interactive.exchange",
     ".runtime .watching.report"),
    (".interactive.*", "cloudpickle .errors .launcher .rank_log .interactive.*", ""),
    (".notebook.*", f"{DOCUMENTS} .errors .launcher .rank_log .whole_files .notebook.*", ""),
    (".ending",     ".errors", ".launcher .runtime ._engine .timeline.recording"),
    (".runtime", f"{SETS} .config .ending .set_table .startup {BESIDE}",      ""),
    (".startup",     "._backends ._engine ._version .config .errors .launcher", ""),
    (".process_sets",          "numpy ._engine .errors",                      ""),
    (".set_table",             SETS,                                          ""),
    ("._engine.mpi_library",   "",                                            "mpi4py"),
    ("._engine.compression",   ENGINE,                                        "ml_dtypes"),
    ("._engine.*",             ENGINE,                                        ""),
    ("._backends",             "numpy .errors",                               "keras ._backends.*"),
    ("._backends.tensorflow",  TF,                                           ""),
    ("._backends.tensorflow_host", "tensorflow numpy",                   "keras"),
    ("._backends.tensorflow_step", "tensorflow",                         "keras"),
    ("._backends.jax", "jax numpy .errors ._backends.jax_devices ._backends.jax_split", "keras"),
    ("._backends.jax_devices", "jax",                                         ""),
    ("._backends.jax_split",   "jax",                                         ""),
    ("._backends.torch",       f"{TORCH} .errors ._backends.torch_overlap",   ""),
    ("._backends.torch_overlap", TORCH,                                       ""),
    ("._backends.torch_tensors", "torch numpy",                      "ml_dtypes"),
    (".data.readers",          f"{DATA} ._engine",                            ""),
    (".data.contents",         "",                                            ""),
    (".data.fetching",         ".data.contents .ownership",           "filelock"),
    (".data.array_dataset",    f"{DATA} keras",                               ""),
    (".data.stream_dataset",   f"{DATA} keras .data.array_dataset",           ""),
    (".data.tf_arrays",        f"{DATA} tensorflow",                          ""),
    (".data.tf_dataset",
        f"{DATA} tensorflow .data.tf_order .data.tf_remainder .data.tf_shuffle", ""),
    (".data.tf_order",         f"{DATA} tensorflow",                          ""),
    (".data.tf_remainder",     f"{DATA} tensorflow",                          ""),
    (".data.tf_shuffle",       f"{DATA} tensorflow",                          ""),
    (".data.torch_loader",     f"{DATA} torch",                               ""),
    (".data.prefetching",      f"{DATA} keras",               "jax tensorflow torch"),
    (".data.*", DATA, "keras tensorflow h5py mpi4py pyarrow PIL filelock rich .data.*"),
    (".watching",              "",                                            ""),
    (".watching.gpu",          "",                                            "pynvml"),
    (".watching.report",       ".watching.gpu",                       ".runtime ._engine"),
    (".watching.job",          ".watching.report",                            ""),
    (".watching.sockets",      ".watching.job .errors .ownership",            ""),
    (".watching.token",        ".errors .ownership .whole_files",             ""),
    (".watching.http",         ".watching.token",                             ""),
    (".watching.web",   ".watching.http .watching.job .watching.token .errors", ""),
    (".watching.publish", ".ownership .watching.job .watching.sockets .watching.token", ""),
    (".watching.prometheus",   ".watching.http .watching.job",                ""),
    (".watching.gather",       "._engine .watching.job .watching.report",     ""),
    (".watching.attend",  "._engine .config .errors .watching.*",             ""),
    (".tensorflow", f"tensorflow {LOOPS} ._backends.tensorflow .elastic .tensorflow.*", ""),
    (".tensorflow.*",          f"tensorflow {LOOPS} ._backends.tensorflow .tensorflow.*", ""),
    (".torch", f"{TORCH} {FACE} {BY_HAND} .elastic .torch.*",                     ""),
    (".torch.direct", "torch .config .runtime ._engine .reduce_op",           ""),
    (".torch.*", f"{TORCH} ._backends.torch_overlap {FACE} {BY_HAND} .torch.*",   ""),
    (".jax.*",                 f"jax {FACE} ._backends.jax {BY_HAND} .jax.*", ""),
    (".migration.*",           "libcst .errors .migration.*",                 ""),
    (".cli.migrate",           ".errors .whole_files",               ".migration.*"),
    (".cli.run_notebook",      ".errors",                            "yaml .notebook"),
    (".timeline.control",      ".runtime .errors .timeline.recording",        ""),
    (".timeline.recording", "._engine .config .errors .timeline.parts .timeline.trace", ""),
    (".timeline.trace",        ".errors .whole_files .timeline.*",            ""),
    (".timeline.report",       "rich .timeline.summary",                      ""),
    (".timeline.figure",       ".timeline.*",                                 "matplotlib"),
    (".timeline.*",            ".errors .timeline.*",                         ""),
    (".cli.timeline",          ".errors",                                     ".timeline.*"),
    (".launched",              ".launcher",                                   ""),
    (".measuring",             "numpy ._engine",                  "keras mpi4py"),
    (".cli.top",  ".errors .watching.job .watching.sockets", ".cli.drawing .watching.web"),
    (".cli.drawing",           ".watching.job rich",                          ""),
    (".cli.bench",   ".errors .cli.*",                                 ".measuring"),
    (".cli.*",       ".config .ending .errors .launcher ._version .cli.*",  "mpi4py yaml"),
    (".callbacks.batches",     f"{ON_KERAS} .callbacks.* .data.epochs .data.nested", ""),
    (".callbacks.backup", f"{ON_KERAS} .callbacks.* .data.begun_anew .data.epochs", ""),
    (".callbacks.random_numbers", f"{ON_KERAS} .data.epochs .generators",     ""),
    (".callbacks.survival",    f"{ON_KERAS} .callbacks.* .data.epochs",       ""),
    (".callbacks.preemption",  f"{ON_KERAS} .callbacks.* .ending",            ""),
    (".callbacks.scalars",  f"{ON_KERAS} .watching.attend .watching.job",   "tensorflow"),
    (".callbacks.*",           f"{ON_KERAS} .callbacks.*",                    ""),
    (".collectives.*",
     f"{FACE} .arguments .bucket_size .config .process_sets .reduce_op .telling .collectives.*",
     ""),
    (".asynchronous",          ".runtime ._engine .collectives .errors",      ""),
    (".elastic",               ".elastic.*",                            ".torch"),
    (".elastic.running",       ".runtime ._engine .errors",                   ""),
    (".elastic.callbacks",     "keras",                                       ""),
    (".elastic.state",         f"{FACE} .elastic.running .keeping.*",         ""),
    (".elastic.models",  f"{FACE} .elastic.state", "torch .built_optimizers .model_state"),
    (".keeping.*",  ".runtime ._engine .errors .whole_files .keeping.*",      ""),
    (".point_to_point",        f"{FACE} .collectives.values",                 ""),
    (".pipeline",              f"{FACE} keras .distributed",                  ""),
    (".optimizer",             f"{ON_KERAS} .arguments",                      ""),
    (".built_optimizers",      "keras .model_state",                          ""),
    (".generators",            "keras numpy .data.kinds",                     ""),
    (".model_state",           "keras numpy",                                 ""),
    (".distributed",           ON_KERAS,                                      ""),
    (".fit_plan",              f"{ON_KERAS} .data.epochs",                    ""),
    (".layers",                ON_KERAS,                                      ""),
    (".loss_scales",           "keras .distributed",                          ""),
    (".optimizers",            "keras .errors",                               ""),
    (".builds",                ".runtime ._engine .errors",                   ""),
    (".arguments",             ".runtime .errors .reduce_op",                 ""),
    (".compression",           "._engine",                                    ""),
    (".reduce_op",             "._engine",                                    ""),
    (".reduction",             ON_KERAS,                                      ""),
    (".update_check",          "keras .errors .runtime",                      ""),
    (".replicas",              ON_KERAS,                                      ""),
    (".saved_terms",           ON_KERAS,                                      ""),
    (".saving",                f"{ON_KERAS} h5py",                            ""),
    (".gradient_plans",        "numpy .bucket_size ._engine .config .terms",  ""),
    (".bucket_size",           "._engine .config",                            ""),
    (".terms",                 f"{FACE} .process_sets",                       "keras"),
    (".trainer",               f"{ON_KERAS} .data.epochs",                    ""),
]  # fmt: skip

COLLECTIVES = set(
    "adasum allgather allgather_async allgather_object allreduce allreduce_async alltoall "
    "alltoall_async barrier bcast broadcast broadcast_ broadcast_async broadcast_into "
    "broadcast_object broadcast_variables exchange exchange_among exchange_bytes "
    "exchange_or_raise exchange_rows gather gather_rows "
    "grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_async "
    "grouped_reducescatter grouped_reducescatter_async meet reduce_slices reducescatter "
    "reducescatter_async scatter stand_in sparse_allreduce sparse_allreduce_async verify_once "
    "verify_replicas verify_before_writing "
    "allgather_parts alltoall_parts broadcast_bytes reduce_through_mpi "
    "Allgather Allgatherv Allreduce Alltoall Alltoallv Barrier Bcast Dup Gather Iallgather "
    "Iallgatherv Ialltoallv Ibarrier "
    "Split".split()
)
RANKS = {"rank", "local_rank", "cross_rank", "root", "is_root"}


def sources():
    """Returns the path of every module of keras_dist by its dotted name, `.` for the face."""
    found = {}
    for path in sorted((ROOT / "keras_dist").rglob("*.py")):
        parts = path.relative_to(ROOT / "keras_dist").with_suffix("").parts
        found["." + ".".join(part for part in parts if part != "__init__")] = path
    return found


SOURCES = sources()


# --- Rule 1: the import table


def check_imports(tree, module):
    row = next((row for row in TABLE if fits(module, row[0])), None)
    if row is None:
        yield 1, f"{module} has no row in the import table"
        return
    _, anywhere, in_functions = row
    for line, name, in_function in imports(tree, module):
        allowed = f"{anywhere} {in_functions}".split() if in_function else anywhere.split()
        if not name.startswith(".") and name in sys.stdlib_module_names:
            continue
        if not any(fits(name, pattern) for pattern in allowed):
            place = "in a function" if in_function else "at the top"
            yield line, f"{module} may not import {name} {place} (the import table)"


def fits(name, pattern):
    room = pattern.removesuffix("*").removesuffix(".")
    return name == pattern or (pattern.endswith("*") and f"{name}.".startswith(f"{room}."))


def imports(node, module, in_function=False):
    """Yields line, name and whether it waits until a function runs, of every import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield child.lineno, room(alias.name), in_function
        elif isinstance(child, ast.ImportFrom):
            origin = room(child.module or "") if child.level == 0 else relative(child, module)
            for alias in child.names:
                inner = f"{origin.rstrip('.')}.{alias.name}"
                yield child.lineno, inner if inner in SOURCES else origin, in_function
        else:
            waits = isinstance(child, ast.FunctionDef | ast.Lambda) or for_types_only(child)
            yield from imports(child, module, in_function or waits)


def room(name):
    """Returns how the table spells an absolute name: own modules by path, others by package."""
    package, _, rest = name.partition(".")
    return f".{rest}" if package == "keras_dist" else package


def relative(node, module):
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f".{package}.{node.module or ''}".replace("..", ".").rstrip(".") or "."


def for_types_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


# --- Rule 2: __all__ is exactly the public names, each with a docstring


def check_public_names(tree, module):
    if module.rpartition(".")[2].startswith("_") and SOURCES[module].name != "__init__.py":
        return
    listed = names_in_all(tree)
    defined = {node.name: node for node in tree.body if isinstance(node, DEFINITIONS)}
    for name, node in defined.items():
        if name.startswith("_"):
            continue
        if name not in listed:
            yield node.lineno, f"{name} is public but not in __all__ (list it or rename it)"
        elif not ast.get_docstring(node):
            yield node.lineno, f"{name} is public and has no docstring"
    known = set(defined) | bound_names(tree)
    for name in listed:
        if name not in known and "__getattr__" not in defined:
            yield 1, f"__all__ names {name}, which the module does not have"


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def names_in_all(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def bound_names(tree):
    """Returns the names that the module binds by import or assignment."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


# --- Rule 3: no assert


def check_no_assert(tree, module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert outside tests (it is gone under -O: raise an error)"


# --- Rule 4: no branch on rank around a collective


def check_no_branch_on_rank(tree, module):
    why = "the ranks that do not come here let the others wait for ever"
    for branch, guarded in branches(tree):
        if not names(branch) & RANKS:
            continue
        for call in collective_calls(guarded):
            yield call.lineno, f"{ast.unparse(call.func)} under a condition on the rank: {why}"


def branches(tree):
    """Yields every condition and the nodes that run, or do not, because of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While):
            yield node.test, node.body + node.orelse
        elif isinstance(node, ast.IfExp):
            yield node.test, [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            yield node.values[0], node.values[1:]
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list):
                yield from early_exits(block)


def early_exits(block):
    """Yields the conditions under which a block is left early, each with what follows."""
    for index, statement in enumerate(block):
        if isinstance(statement, ast.If) and isinstance(
            statement.body[-1], ast.Return | ast.Continue | ast.Break
        ):
            yield statement.test, block[index + 1 :]


def names(expression):
    return {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(expression)}


def collective_calls(nodes):
    for node in nodes:
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if name in COLLECTIVES:
                    yield call


# --- The rules hold


RULES = [check_imports, check_public_names, check_no_assert, check_no_branch_on_rank]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    violations = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for module, path in SOURCES.items()
        for line, text in rule(ast.parse(path.read_text()), module)
    ]
    assert not violations, "\n" + "\n".join(violations)


# --- The rules can see


def violations(rule, module, source):
    return [text for _, text in rule(ast.parse(textwrap.dedent(source)), module)]


@pytest.mark.parametrize(
    ("module", "source", "culprit"),
    [
        (".errors", "from keras_dist import config", ".config"),
        (".config", "import numpy as np", "numpy"),
        (".runtime", "import keras", "keras"),
        (".runtime", "from keras_dist import _engine, callbacks", ".callbacks"),
        (".runtime", "from keras_dist._engine.reduce import reduce_rows", "._engine.reduce"),
        (".runtime", "from keras_dist._engine import buckets", "._engine.buckets"),
        (".runtime", "from . import optimizer", ".optimizer"),
        ("._engine.reduce", "import tensorflow as tf", "tensorflow"),
        ("._engine.reduce", "from mpi4py import MPI", "mpi4py"),
        ("._engine.reduce", "from .. import runtime", ".runtime"),
        ("._backends.tensorflow", "import mpi4py.MPI", "mpi4py"),
        ("._backends", "import tensorflow.python.keras", "tensorflow"),
        (".optimizer", "if True:\n    import tensorflow", "tensorflow"),
        (".optimizer", "def f():\n    from keras_dist._backends import tensorflow", "._backends"),
        (".data.arrays", "from keras_dist.data import tf_dataset", ".data.tf_dataset"),
        (".data.arrays", "import tensorflow as tf", "tensorflow"),
        (".cli", "import argparse\nfrom mpi4py import MPI", "mpi4py"),
        (".cli", "def f():\n    import keras", "keras"),
        (".", "from keras_dist import optimizer", ".optimizer"),
        (".new_room", "", "no row"),
    ],
)
def test_import_is_refused(module, source, culprit):
    [text] = violations(check_imports, module, source)
    assert culprit in text


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (".config", "import os.path\nfrom keras_dist import errors"),
        (".runtime", "import numpy as np\nfrom keras_dist import _engine\n"),
        (".runtime", "from keras_dist._engine import Communicator\nfrom .errors import explain"),
        ("._engine.mpi_library", "def f():\n    from mpi4py import MPI"),
        ("._engine.collectives.barrier", "from keras_dist._engine.collectives.meet import meet"),
        ("._backends.tensorflow", "import tensorflow as tf\nfrom keras_dist import errors"),
        (".cli", "import argparse\ndef f():\n    from mpi4py import MPI"),
        (".", "if TYPE_CHECKING:\n    from keras_dist.optimizer import DistributedOptimizer"),
    ],
)
def test_import_is_allowed(module, source):
    assert not violations(check_imports, module, source)


@pytest.mark.parametrize(
    ("source", "culprit"),
    [
        ("__all__ = []\ndef reduce(): 'Adds up.'", "not in __all__"),
        ("def reduce(): 'Adds up.'", "not in __all__"),
        ("__all__ = ['reduce']\ndef reduce(): pass", "no docstring"),
        ("__all__ = ['Plan']\nclass Plan: pass", "no docstring"),
        ("__all__ = ['missing']", "does not have"),
    ],
)
def test_public_names_are_checked(source, culprit):
    [text] = violations(check_public_names, ".runtime", source)
    assert culprit in text


@pytest.mark.parametrize(
    "source",
    [
        "",
        "__all__ = ['reduce', 'LIMIT']\nLIMIT = 3\ndef reduce(): 'Adds up.'\ndef _add(): pass",
        "from keras_dist.errors import explain\n__all__ = ['explain']",
        "__all__ = ['late']\ndef __getattr__(name): pass",
    ],
)
def test_public_names_are_accepted(source):
    assert not violations(check_public_names, ".runtime", source)


def test_assert_is_found():
    assert violations(check_no_assert, ".runtime", "def f(x):\n    assert x, 'no x'")


@pytest.mark.parametrize(
    "source",
    [
        "if rank() == 0:\n    barrier()",
        "if runtime.rank() == 0:\n    pass\nelse:\n    runtime.barrier()",
        "if self.rank == root and x:\n    with open(path):\n        y = self.comm.allreduce(x)",
        "while local_rank < 2:\n    exchange(x)",
        "x = allgather(x) if rank else x",
        "rank == 0 and broadcast_object(x)",
        "def f():\n    if rank() != 0:\n        return\n    write()\n    barrier()",
        "for x in y:\n    if is_root:\n        continue\n    allreduce(x)",
    ],
)
def test_branch_on_rank_is_found(source):
    [text] = violations(check_no_branch_on_rank, ".runtime", source)
    assert "wait for ever" in text


@pytest.mark.parametrize(
    "source",
    [
        "if size() > 1:\n    barrier()",
        "if rank() == 0:\n    write()\nbarrier()",
        "value = load() if rank() == 0 else None\nvalue = broadcast_object(value, root=0)",
        "if not 0 <= root < size:\n    raise ValueError(root)\nbroadcast(x, root)",
        "text = ', '.join(names) if rank else ''",
    ],
)
def test_branch_beside_a_collective_is_accepted(source):
    assert not violations(check_no_branch_on_rank, ".runtime", source)
