"""Makes the jobs of tests start and end faster; Python imports this module at startup.

Optional packages are hidden as if they were not installed: Keras imports them if it finds them,
which takes half of the startup time. The compiler of torch takes half of what is left on that
backend: it is imported when it is used. The garbage collector ignores the objects of frameworks: a
collection at interpreter shutdown takes half as long as the imports.
"""

import atexit
import functools
import gc
import importlib
import os
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder

# torch's compiler imports Triton if it is there; 3.9 aborts a process with TensorFlow 2.21.
LEFT_OUT = {"IPython", "matplotlib", "pandas", "triton", *os.environ["LEFT_OUT"].split()}
LEFT_OUT -= {*os.environ.get("NEEDED", "").split()}
COMPILER = "torch._dynamo"


class LateCompiler(types.ModuleType):
    """Stands in for torch's compiler until an attribute other than `disable` or `reset` is used."""

    @staticmethod
    def disable(function=None, *arguments, **options):
        """Returns a function that the compiler leaves to Python once it is imported.

        So are the functions that it calls. Without an argument, returns a decorator.
        """
        if function is None:
            return LateCompiler.disable

        @functools.wraps(function)
        def left_to_python(*args, **kwargs):
            compiler = sys.modules.get(COMPILER)
            if compiler is None or isinstance(compiler, LateCompiler):
                return function(*args, **kwargs)
            return compiler.disable(function)(*args, **kwargs)

        left_to_python._torchdynamo_disable = True
        return left_to_python

    @staticmethod
    def reset():
        """Does nothing: nothing has been compiled."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        Finder.late = False
        return getattr(importlib.import_module(COMPILER), name)


class Finder(PathFinder):
    """Finds all modules that are not hidden, and a stand-in for torch's compiler."""

    late = True

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in LEFT_OUT:
            return None
        if cls.late and name == COMPILER:
            return ModuleSpec(name, cls, is_package=True)
        if cls.late and name.startswith(f"{COMPILER}."):
            sys.modules[COMPILER].config  # noqa: B018  # imports the compiler itself
            path = sys.modules[COMPILER].__path__
        return super().find_spec(name, path, target)

    @staticmethod
    def create_module(spec):
        return LateCompiler(spec.name)

    @staticmethod
    def exec_module(module):
        """There is nothing to execute."""


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder

# Keras imports kernels for TPUs, and JAX solvers of SciPy for sparse matrices: a quarter of the
# time in which both are imported. They have no modules, so that each use of them fails.
kernels = {"splash_attention_kernel": None, "splash_attention_mask": None}
for name, contents in (
    ("jax.experimental.pallas.ops.tpu.splash_attention", kernels),
    ("jax.experimental.sparse.linalg", {}),
):
    sys.modules[name] = types.SimpleNamespace(**contents)


@atexit.register  # registered first, so it is called last
def leave_garbage():
    """Jobs without Keras end as usual, so that they test the cleanup at the end."""
    if "keras" in sys.modules:
        gc.freeze()


# The objects of a framework live until exit; collections during its import find little.
gc.set_threshold(100_000, 50, 100)
