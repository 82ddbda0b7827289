"""Leaves modules out, as if they were not installed: Python runs this before anything else.

Keras imports these where they are, which takes half of the time in which a job starts.
"""

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
