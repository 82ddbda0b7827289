"""Rules for the sources of keras_dist, checked on their syntax trees.

Each rule is a function of the syntax tree and the dotted name of a module that yields the line and
the text of every violation. Each rule is tested with a planted violation.
"""

import ast
import collections
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The packages of keras_dist, lowest first. A package imports those of lines above its own, inside
# functions as well, and for types.
LAYERS = [
    "errors _version",
    "config",
    "_compat",
    "_gpu",
    "_engine _backends",
    "runtime",
    "storage",
    "monitor ops",
    "data",
    "training",
    "layers metrics optimizers",
    "resume",
    "checkpoints callbacks",
    "elastic",
    "tensorflow torch jax",
    "migrate",
    "launch",
    "dask kubernetes ray spark",
    "",
]

# Libraries that a package imports at the top of a module, and libraries that only its functions
# import, so that they cost nothing until they are used. Further rows are for prefixes of modules.
LIBRARIES = {
    "": ("lazy_loader", ""),
    "runtime": ("lazy_loader numpy", ""),
    "_gpu": ("numpy", ""),
    "_engine": ("numpy", "ml_dtypes"),
    "_engine.mpi.library": ("", "mpi4py"),
    "_backends": ("numpy", "keras ml_dtypes"),
    "_backends.tensorflow": ("tensorflow", ""),
    "_backends.torch": ("torch", ""),
    "_backends.jax": ("jax", ""),
    "_compat.keras": ("keras", ""),
    "_compat.tensorflow": ("tensorflow", ""),
    "_compat.tf_data": ("tensorflow", ""),
    "_compat.torch": ("torch", ""),
    "_compat.jax": ("jax numpy", ""),
    "ops": ("numpy", "keras"),
    "monitor": ("", "pynvml"),
    "monitor.prometheus": ("prometheus_client", ""),
    "data": ("lazy_loader numpy", "keras tensorflow h5py pyarrow PIL filelock rich"),
    "data.array_dataset": ("keras", ""),
    "data.streams": ("keras", ""),
    "data.prefetching": ("keras", "jax tensorflow torch"),
    "data.tf_": ("tensorflow", ""),
    "data.torch_": ("torch", ""),
    "training": ("keras numpy", ""),
    "training.random_generators": ("", "torch"),
    "training.saving": ("h5py", ""),
    "resume": ("keras numpy", ""),
    "checkpoints": ("keras", ""),
    "layers": ("keras", ""),
    "metrics": ("keras", ""),
    "optimizers": ("keras", ""),
    "callbacks": ("keras numpy", "tensorflow"),
    "elastic": ("numpy", "keras torch"),
    "elastic.commit_callbacks": ("keras", ""),
    "elastic.torch_": ("torch", ""),
    "tensorflow": ("tensorflow keras numpy", ""),
    "torch": ("torch numpy", ""),
    "jax": ("jax numpy", ""),
    "migrate": ("libcst", ""),
    "launch": ("numpy", "keras mpi4py rich yaml IPython"),
    "launch.interactive": ("cloudpickle", "rich"),
    "launch.interactive.outcome": ("cloudpickle", ""),
    "dask": ("distributed", ""),
    "kubernetes": ("cloudpickle lazy_loader", ""),
    "kubernetes.train_job": ("keras numpy", ""),
    "ray": ("lazy_loader ray", ""),
    "ray.train_report": ("keras numpy", ""),
    "spark": ("pyspark", ""),
    "launch.cli.timeline": ("rich", "matplotlib"),
    "launch.cli.top": ("rich", ""),
    "launch.notebook": ("IPython nbformat traitlets", ""),
}

# The packages and modules of the engine, lowest first; modules of one line are not ordered.
ENGINE_LAYERS = [
    "arithmetic gradient_compression low_rank quantization buckets gradient_sets",
    "compression",
    "signature",
    "tracing",
    "shm",
    "mpi ordering memory sideband",
    "faults",
    "communicator",
    "recovery",
    "nccl",
    "collectives",
    "mpi_file point_to_point",
    "",
]

# Packages whose modules are private: other packages import only the names of the package.
FACES = ["_engine", "_gpu"]

COLLECTIVES = set(
    "adasum allgather allgather_async allgather_object allgather_objects allreduce allreduce_async "
    "alltoall alltoall_async barrier bcast broadcast broadcast_ broadcast_async broadcast_into "
    "broadcast_object broadcast_variables compare_gradients exchange exchange_among exchange_bytes "
    "exchange_or_raise exchange_rows gather gather_rows "
    "grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_async "
    "grouped_reducescatter grouped_reducescatter_async rendezvous reduce_slices reducescatter "
    "reducescatter_async scatter stand_in sparse_allreduce sparse_allreduce_async verify_once "
    "verify_replicas verify_before_writing "
    "allgather_parts alltoall_parts broadcast_bytes reduce_through_mpi "
    "Allgather Allgatherv Allreduce Alltoall Alltoallv Barrier Bcast Dup Gather Iallgather "
    "Iallgatherv Ialltoallv Ibarrier "
    "Split".split()
)
RANKS = {"rank", "local_rank", "cross_rank", "root", "is_root"}


def sources():
    """Returns the path of every module of keras_dist by dotted name; `.` is the package itself."""
    found = {}
    for path in sorted((ROOT / "keras_dist").rglob("*.py")):
        parts = path.relative_to(ROOT / "keras_dist").with_suffix("").parts
        found["." + ".".join(part for part in parts if part != "__init__")] = path
    return found


SOURCES = sources()
TREES = {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


# --- Rule 1: the imports


def check_imports(tree, module):
    own = module.removeprefix(".")
    if floor(own) is None:
        yield 1, f"{module} is in no package of LAYERS"
        return
    for line, name, in_function in imports(tree, module):
        place = "in a function" if in_function else "at the top"
        if name.startswith("."):
            why = arrow_up(own, name.removeprefix("."), in_function)
        elif name in sys.stdlib_module_names or name in libraries(own, in_function):
            why = None
        else:
            why = "see LIBRARIES"
        if why is not None:
            yield line, f"{module} may not import {name} {place} ({why})"


def floor(module):
    package = module.partition(".")[0]
    return next((n for n, line in enumerate(LAYERS) if package in line.split(" ")), None)


def arrow_up(module, imported, in_function=False):
    """Returns why a module of keras_dist may not import another; `None` if it may."""
    package, other = module.partition(".")[0], imported.partition(".")[0]
    if package == other:
        return arrow_up_in_engine(module, imported) if package == "_engine" else None
    if floor(other) is None or floor(other) >= floor(module):
        return f"{other or 'keras_dist'} is not below {package or 'keras_dist'}, see LAYERS"
    if other == "_compat":
        frameworks = libraries(imported, False) - libraries(module, in_function)
        if frameworks:
            return f"it imports {' '.join(frameworks)}, see LIBRARIES"
    if any(imported.startswith(f"{face}.") for face in FACES):
        return f"use the face of {other}, see FACES"
    if imported.startswith("_backends.") and not imported.startswith(f"_backends.{package}"):
        return "use the face of _backends, or the backend of the same name"
    return None


def arrow_up_in_engine(module, imported):
    """Returns why a module of the engine may not import another; `None` if it may."""
    own, other = (f"{name}.".split(".")[1] for name in (module, imported))
    floors = [
        next((n for n, row in enumerate(ENGINE_LAYERS) if name in row.split(" ")), -1)
        for name in (own, other)
    ]
    if own != other and (-1 in floors or floors[1] > floors[0]):
        return f"{other} is not below {own}, see ENGINE_LAYERS"
    return None


def libraries(module, in_function):
    """Returns the libraries that a module may import."""
    rows = [row for name, row in LIBRARIES.items() if is_row_of(name, module)]
    return {name for row in rows for name in " ".join(row[: 1 + in_function]).split()}


def is_row_of(name, module):
    package = name.partition(".")[0]
    return package == module.partition(".")[0] and module.startswith(name)


def imports(node, module, in_function=False):
    """Yields line and name of every import, and whether it is inside a function."""
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
    """Returns the spelling of a name in the table: own modules by path, others by package."""
    package, _, rest = name.partition(".")
    return f".{rest}" if package == "keras_dist" else package


def relative(node, module):
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f".{package}.{node.module or ''}".replace("..", ".").rstrip(".") or "."


def for_types_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def test_no_circle_of_imports():
    graph = {module: own_imports(module) for module in SOURCES}
    graphlib.TopologicalSorter(graph).prepare()  # its error has the circle


def own_imports(module):
    imported = {name for _, name, _ in imports(TREES[module], module)}
    return imported & {*SOURCES} - {module}


# --- Rule 2: public names have a docstring; __all__ stands at faces and where names are re-exported


def check_public_names(tree, module):
    if module.rpartition(".")[2].startswith("_") and SOURCES[module].name != "__init__.py":
        return
    defined = {node.name: node for node in tree.body if isinstance(node, DEFINITIONS)}
    for name, node in defined.items():
        if not name.startswith("_") and not ast.get_docstring(node):
            yield node.lineno, f"{name} is public and has no docstring"
    listed = names_in_all(tree)
    if listed is None:
        return
    for name in defined:
        if not name.startswith("_") and name not in listed:
            yield defined[name].lineno, f"{name} is public but not in __all__ (or rename it)"
    known = set(defined) | bound_names(tree)
    for name in listed:
        if name not in known and "__getattr__" not in defined:
            yield 1, f"__all__ names {name}, which the module does not have"
    face = SOURCES[module].name == "__init__.py" or module.count(".") == 1
    if not face and not set(listed) - set(defined):
        yield 1, "__all__ outside a face, where nothing is re-exported"


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def names_in_all(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def bound_names(tree):
    """Returns the names that the module binds by import or assignment."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


# --- Rule 3: no branch on rank around a collective


def check_no_branch_on_rank(tree, module):
    why = "the ranks that do not come here let the others wait for ever"
    for branch, guarded in branches(tree):
        if not names(branch) & RANKS:
            continue
        for call in collective_calls(guarded):
            yield call.lineno, f"{ast.unparse(call.func)} under a condition on the rank: {why}"


def branches(tree):
    """Yields every condition and the nodes that depend on it."""
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
    """Yields the conditions of early exits from a block, each with the following nodes."""
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


# --- Rule 4: private names of frameworks are in _compat alone

OURS, COMPAT = "_keras_dist", "keras_dist._compat."
# Attributes of Python that begin with an underscore and are documented.
DOCUMENTED = {"os._exit", "sys._current_frames"}
PRIVATE_MODULES = ("keras.src", "jax._src", "jaxlib", "tensorflow.python", "tf.python")
# Optional attributes of objects: the reason why their absence is not an error.
OPTIONAL = {
    "MAP_POPULATE": "of Linux alone",
    "buckets": "of plans of ours",
    "calls_host": "of layers of ours",
    "dry_run": "of some commands of ours",
    "dtype": "of tensors and variables; Python's numbers have none",
    "dtypes": "of tables of pandas",
    "element_spec": "of iterators of tf.data",
    "epochs": "of data sets of ours",
    "host_discovery_script": "of some commands of ours",
    "is_on": "of a thread of ours",
    "name": "of variables; tensors have none",
    "num_batches": "of data sets of ours and Keras, a public name; lists have none",
    "op": "of tensors of a graph, a public name",
    "optimizer": "of compiled models, a public name, see `optimizer_of`",
    "path": "of variables of Keras, a public name; those of frameworks have none",
    "process_set_id": "of process sets of ours",
    "shape": "of arrays; lists have none",
    "strerror": "of errors of the system",
    "count": "of a thread of ours",
    "value": "of members of enumerations of ours",
    "wire": "of compressors of ours",
}


def check_private_names(tree, module):
    if module.startswith("._compat"):
        for line, name in absolute_imports(tree):
            if is_private_path(name):
                yield line, f"import of {name}: let Name import it where it is first needed"
        return
    for line, name in absolute_imports(tree):
        if is_private_path(name):
            yield line, f"import of {name}: put what needs it into _compat"
    package = module.split(".")[1]
    for node, owner in with_classes(tree):
        if isinstance(node, ast.Attribute):
            if is_private_attribute(node, owner, package):
                yield node.lineno, f"{ast.unparse(node)} is private: put it into _compat"
        elif isinstance(node, ast.FunctionDef) and owner in FRAMEWORK_CLASSES:
            if node.name in PRIVATE:
                yield node.lineno, f"{node.name} overrides a private name: put it into _compat"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            private = node.value.startswith("_") and node.value in PRIVATE
            if private or node.value.startswith(PRIVATE_MODULES):
                yield node.lineno, f"{node.value!r} is private: put it into _compat"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESSES:
            yield from check_access_by_name(node, package)


def absolute_imports(tree):
    """Yields line and dotted name of every import of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            origin = getattr(node, "module", None) or ""
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}".strip(".")


ACCESSES = ("getattr", "hasattr", "setattr", "delattr", "object.__setattr__", "object.__delattr__")


def check_access_by_name(call, package):
    name = call.args[1] if len(call.args) > 1 else None
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return
    if is_underscored(name.value) and name.value not in DEFINED[package]:
        if name.value not in PRIVATE and not name.value.startswith(OURS):  # or it was found
            yield call.lineno, f"{ast.unparse(call)} is private: put it into _compat"
    elif len(call.args) == 3 and ast.unparse(call.func) == "getattr" and name.value not in OPTIONAL:
        dunder = name.value.startswith("__")
        if not dunder and not name.value.startswith(OURS):
            yield (
                call.lineno,
                (
                    f"{ast.unparse(call)} has a default, so that a framework may rename "
                    f"{name.value} without an error: put it into _compat, or see OPTIONAL"
                ),
            )


def is_private_attribute(node, owner, package):
    name, base = node.attr, node.value
    if ast.unparse(node).startswith(PRIVATE_MODULES):
        return True
    if not is_underscored(name) or name.startswith(OURS) or ast.unparse(node) in DOCUMENTED:
        return False
    if ast.unparse(base) == "super()" and name in PRIVATE:
        return True
    if ast.unparse(base) in ("self", "cls", "super()") and owner is not None:
        return name not in ALL_DEFINED or (owner in FRAMEWORK_CLASSES and name in PRIVATE)
    return name in PRIVATE or name not in DEFINED[package]


def is_private_path(name):
    parts = name.split(".")
    if parts[0] in ("keras_dist", "__future__"):
        return False
    return name.startswith(PRIVATE_MODULES) or any(map(is_underscored, parts))


def is_underscored(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def with_classes(node, owner=None):
    """Yields every node with the name of its class."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.ClassDef) else owner
        yield child, owner
        yield from with_classes(child, inner)


def defined_names(tree):
    """Returns the names that a module gives to attributes of its own classes."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif is_own_attribute(node) and isinstance(node.ctx, ast.Store):
            yield node.attr


def is_own_attribute(node):
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")


def private_names():
    """Returns the private names that _compat uses."""
    for module, tree in TREES.items():
        if module.startswith("._compat."):
            for node in ast.walk(tree):
                attribute = isinstance(node, ast.Attribute) and node.attr
                text = isinstance(node, ast.Constant) and node.value
                for name in (attribute, text):
                    if isinstance(name, str) and is_underscored(name) and name.isidentifier():
                        yield name


def framework_classes():
    """Returns the names of classes of keras_dist that derive from one of a framework."""
    bases = {}
    found = set()
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named = [ast.unparse(base) for base in node.bases]
                bases.setdefault(node.name, set()).update(named)
                of_framework = named and named[0].startswith(("keras.", "torch.", "tf.", "jax."))
                if of_framework or module.startswith("._compat."):
                    found.add(node.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(COMPAT):
                found |= {alias.asname for alias in node.names if alias.asname}
    while more := {n for n, over in bases.items() if over & found} - found:
        found |= more
    return found


PRIVATE = {name for name in private_names() if not name.startswith(OURS)}
FRAMEWORK_CLASSES = framework_classes()
DEFINED = {}
for _module, _tree in TREES.items():
    DEFINED.setdefault(_module.split(".")[1], set()).update(defined_names(_tree))
ALL_DEFINED = set().union(*DEFINED.values())


# --- Rule 5: one session steers a fit

STEERS = {"train_function", "test_function", "make_train_function", "make_test_function"}


def check_no_patches(tree, module):
    """Callbacks give their work to the session, which `training/keras_hooks` calls from Keras."""
    if not module.startswith(".callbacks"):
        return
    for node in ast.walk(tree):
        assigned = node.targets if isinstance(node, ast.Assign) else []
        for target in (each for each in assigned if isinstance(each, ast.Attribute)):
            path = ast.unparse(target)
            if path.startswith("keras.") or target.attr in STEERS:
                yield node.lineno, f"{path} is patched: give the work to the session of the fit"


# --- The rules on keras_dist


RULES = [
    check_imports,
    check_public_names,
    check_no_branch_on_rank,
    check_private_names,
    check_no_patches,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    violations = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for module, path in SOURCES.items()
        for line, text in rule(TREES[module], module)
    ]
    assert not violations, "\n" + "\n".join(violations)


# Public names that a framework's package has as well, as Horovod's have, or another system.
NAMED_AGAIN = {"Compression", "Compressor", "ProgressCallback", "SyncBatchNormalization"}


def test_no_two_classes_have_one_name():
    found = collections.defaultdict(list)
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in NAMED_AGAIN | {"fp16", "bf16"}:
                found[node.name].append(module)
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


# --- The rules on planted violations

IMPORTS = [  # module, source, and what is named
    (".errors", "from keras_dist import config", ".config"),
    (".runtime", "import keras", "keras"),
    (".runtime", "from keras_dist import _engine, callbacks", ".callbacks"),
    (".runtime", "from keras_dist._engine.collectives import fused", "._engine.coll"),
    (".runtime.job", "from ..training import optimizer", ".training.optimizer"),
    ("._engine.arithmetic", "from mpi4py import MPI", "mpi4py"),
    ("._engine.arithmetic", "from .. import runtime", ".runtime"),
    ("._engine.arithmetic", "import keras_dist._compat.torch", "torch"),
    ("._engine.shm.wait", "import keras_dist._engine.communicator", "communicator is not below"),
    ("._backends", "import tensorflow.python.keras", "tensorflow"),
    (".training.optimizer", "if True:\n    import tensorflow", "tensorflow"),
    (".training.optimizer", "def f():\n    import keras_dist._backends.jax", "._backends"),
    (".torch.layers", "from keras_dist._backends import jax_split", "._backends.jax_split"),
    (".launch.cli", "import argparse\nfrom mpi4py import MPI", "mpi4py"),
    (".launch.cli", "def f():\n    import tensorflow", "tensorflow"),
    (".launch", "from keras_dist.launch import cli\nimport keras_dist", "not below"),
    (".new_room", "", "no package"),
]
WRONG = {
    check_public_names: [
        "__all__ = []\ndef reduce(): 'Adds up.'",
        "def reduce(): pass",
        "__all__ = ['Plan']\nclass Plan: pass",
        "__all__ = ['missing']",
    ],
    check_no_branch_on_rank: [
        "if rank() == 0:\n    barrier()",
        "if runtime.rank() == 0:\n    pass\nelse:\n    runtime.barrier()",
        "if self.rank == root and x:\n    with open(path):\n        y = self.comm.allreduce(x)",
        "while local_rank < 2:\n    exchange(x)",
        "x = allgather(x) if rank else x",
        "rank == 0 and broadcast_object(x)",
        "def f():\n    if rank() != 0:\n        return\n    write()\n    barrier()",
        "for x in y:\n    if is_root:\n        continue\n    allreduce(x)",
    ],
    check_private_names: [
        "optimizer._keras_shape",
        "self.model._initial_epoch = 3",
        "keras.src.backend.common",
        "from keras.src import backend",
        "import tensorflow.python.eager",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "getattr(optimizer, '_trainable_variables', ())",
        "hasattr(stage, '_some_new_name')",
        "object.__setattr__(model, '_some_new_name', 1)",
        "NAME = '_get_metrics_result_or_logs'",
        "module.startswith('keras.src.')",
        "getattr(optimizer, 'variables', ())",
        "class A(keras.callbacks.Callback):\n    def f(self):\n        self._unknown_name",
        "class Mixin:\n    def f(self, grads):\n        super()._clip_gradients(grads)",
        "class BackupAndRestore(KerasBackup):\n    def _save_model(self):\n        pass",
        "class BackupAndRestore(KerasBackup):\n    def f(self):\n        self._current_epoch = 1",
    ],
    check_no_patches: ["keras.Model.fit = fit", "self.model.train_function = f"],
}
RIGHT = {
    check_imports: [
        "from keras_dist import config",
        "from keras_dist._compat.keras import layers_of",
        "def f():\n    import tensorflow",
        "if TYPE_CHECKING:\n    from keras_dist.training.optimizer import DistributedOptimizer",
    ],
    check_public_names: [
        "def reduce(): 'Adds up.'",
        "__all__ = ['reduce', 'LIMIT']\nLIMIT = 3\ndef reduce(): 'Adds.'\ndef _add(): pass",
        "from keras_dist.errors import explain\n__all__ = ['explain']",
        "__all__ = ['late']\ndef __getattr__(name): pass",
    ],
    check_no_branch_on_rank: [
        "if size() > 1:\n    barrier()",
        "if rank() == 0:\n    write()\nbarrier()",
        "value = load() if rank() == 0 else None\nvalue = broadcast_object(value, root=0)",
        "if not 0 <= root < size:\n    raise ValueError(root)\nbroadcast(x, root)",
        "text = ', '.join(names) if rank else ''",
    ],
    check_private_names: [
        "import os\nos._exit(1)",
        "optimizer._keras_dist.registered",
        "optimizer.__class__.__mro__",
        "getattr(leaf, 'shape', None)",
        "getattr(gradient, '_keras_dist_reduced', False)",
        "from keras_dist.data.row_files import _own",
        "class A:\n    def f(self):\n        self._names = []\n        return self._plans",
    ],
}


def violations(rule, module, source):
    return [text for _, text in rule(ast.parse(source), module)]


@pytest.mark.parametrize(("module", "source", "culprit"), IMPORTS)
def test_a_wrong_import_is_named(module, source, culprit):
    [text] = violations(check_imports, module, source)
    assert culprit in text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_wrong_is_told_from_right(rule):
    found = [source for source in WRONG.get(rule, []) if violations(rule, ".callbacks", source)]
    assert found == WRONG.get(rule, [])
    assert not [text for text in RIGHT.get(rule, []) if violations(rule, ".callbacks", text)]


def test_compat_imports_private_modules_late():
    source = "from tensorflow.python.eager import record"
    assert violations(check_private_names, "._compat.tensorflow", source)
