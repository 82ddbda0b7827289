"""Makes jobs of tests start and end sooner: Python runs this before anything else.

It leaves modules out, as if they were not installed: Keras imports these where they are, which
takes half of the time in which a job starts. And the garbage collector passes frameworks over:
to search them when the interpreter ends takes half as long as to import them.
"""

import atexit
import gc
import os
import sys
from importlib.machinery import PathFinder

LEFT_OUT = {"IPython", "matplotlib", "pandas", *os.environ["LEFT_OUT"].split()}


class Finder(PathFinder):
    """Finds all other modules."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in LEFT_OUT else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder


@atexit.register  # before all others, so it is called after them
def leave_garbage():
    """Jobs without Keras end as ever: what the end of a job has to clean up is shown by those."""
    if "keras" in sys.modules:
        gc.freeze()


# A framework is made of objects that stay: there is little to find while it is imported.
gc.set_threshold(100_000, 50, 100)
