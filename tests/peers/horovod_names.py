"""Modules with Horovod's names, which hold what `keras-dist migrate` puts in their place."""

import importlib
import os
import sys
import threading
import types
import unittest.mock

from keras_dist.migrate.names import MODULES


class Renamed(types.ModuleType):
    """A module of Horovod that has the names of one of keras_dist."""

    def __init__(self, name, replacement):
        super().__init__(name)
        self.__path__ = []
        self._replacement = replacement

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._replacement), name)


class parameterized:
    """Stands in for the package of this name."""

    @staticmethod
    def expand(cases):
        """Adds one method for each case to the class in whose body it is called."""
        methods = sys._getframe(1).f_locals

        def add(function):
            for number, case in enumerate(cases):
                arguments = case if isinstance(case, tuple | list) else (case,)
                methods[f"{function.__name__}_{number}"] = with_arguments(function, arguments)

        def with_arguments(function, arguments):
            return lambda self: function(self, *arguments)

        return add


def install():
    """Makes `import horovod` find these modules, and helpers that only Horovod's tests use."""
    for name, replacement in MODULES.items():
        add(Renamed(name, replacement))
    for name, helpers in HELPERS.items():
        parents = name.split(".")
        for depth in range(1, len(parents)):
            if ".".join(parents[:depth]) not in sys.modules:
                add(Renamed(".".join(parents[:depth]), "keras_dist"))
        module = types.ModuleType(name)
        vars(module).update(helpers)
        add(module)
    sys.modules["mock"] = unittest.mock
    known = vars(sys.modules["horovod.tensorflow"])
    known.update(gpu_available=lambda *frameworks: False, _executing_eagerly=is_eager)
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        stay_eager()
    if os.environ["KERAS_BACKEND"] == "torch":
        leave_out_muon()


def stay_eager():
    """Leaves out the run of a test in a graph of TensorFlow 1, which has no program order."""
    from tensorflow.python.framework import test_util

    test_util.run_all_in_graph_and_eager_modes = lambda tests: tests


def leave_out_muon():
    """Hides an optimizer from the tests that run every optimizer of torch on models with biases.

    `torch.optim.Muon` takes matrices only; torch had no such optimizer when the tests were written.
    """
    import torch

    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "muon"


def add(module):
    """Adds a module to those that are imported, and to its parent."""
    sys.modules[module.__name__] = module
    parent, _, name = module.__name__.rpartition(".")
    if parent in sys.modules:
        vars(sys.modules[parent])[name] = module


def is_version_greater_equal_than(version, least):
    from packaging.version import parse

    return parse(version) >= parse(least)


def is_eager():
    import tensorflow

    return tensorflow.executing_eagerly()


def rank_and_size():
    from ranks.conftest import rank, size

    return rank, size


HELPERS = {
    "horovod.common.util": {"is_version_greater_equal_than": is_version_greater_equal_than},
    "horovod.tensorflow.util": {"_executing_eagerly": is_eager},
    "horovod.runner.common.util.env": {"get_env_rank_and_size": rank_and_size},
    "horovod.runner.util.threads": {"in_thread": threading.Thread},
    "parameterized": {"parameterized": parameterized},
}
