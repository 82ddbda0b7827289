"""Makes the jobs of tests start and end faster; Python imports this module at startup.

Optional packages are hidden as if they were not installed: Keras imports them if it finds them,
which takes half of the startup time. The garbage collector ignores the objects of frameworks: a
collection at interpreter shutdown takes half as long as the imports.
"""

import atexit
import gc
import os
import sys
from importlib.machinery import PathFinder

LEFT_OUT = {"IPython", "matplotlib", "pandas", *os.environ["LEFT_OUT"].split()}


class Finder(PathFinder):
    """Finds all modules that are not hidden."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in LEFT_OUT else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder


@atexit.register  # registered first, so it is called last
def leave_garbage():
    """Jobs without Keras end as usual, so that they test the cleanup at the end."""
    if "keras" in sys.modules:
        gc.freeze()


# The objects of a framework live until exit; collections during its import find little.
gc.set_threshold(100_000, 50, 100)
