"""Private names of Python's standard library."""

import importlib
import platform
import sys
import threading
from typing import Any

from keras_dist._compat.contract import Name

__all__ = ["CONTRACT", "inherits_script", "is_foreign_thread", "is_mine", "version"]


def version() -> str:
    """Returns the name and the version of the interpreter."""
    return f"Python {platform.python_version()}"


def is_mine(lock: Any) -> bool:
    """Tells whether the calling thread holds an `RLock`, as `threading.Condition` asks."""
    return bool(lock._is_owned())


def is_foreign_thread(thread: threading.Thread) -> bool:
    """Tells whether Python has met a thread without having started it."""
    return isinstance(thread, threading._DummyThread)


def inherits_script() -> bool:
    """Tells whether `multiprocessing` is running the script of the parent in this process."""
    process: Any = sys.modules.get("multiprocessing.process")  # in a child it is there
    # Set in the child, while it prepares alone: elsewhere there is no such attribute.
    return process is not None and "_inheriting" in vars(process.current_process())


def _spawn() -> Any:
    return importlib.import_module("multiprocessing.spawn")


CONTRACT = (
    Name(
        lambda: type(threading.RLock()),
        "_is_owned",
        "to let a collective that is part of another one pass",
        "a collective inside another one would wait for itself",
        (),
    ),
    Name(
        lambda: threading,
        "_DummyThread",
        "to leave threads of frameworks out when the script's threads are counted",
        "the queue of collectives would wait for threads of a framework",
    ),
    Name(
        _spawn,
        "_inheriting",
        "to recognise a process that multiprocessing has started while it imports the script",
        "such a process would join the job as a rank",
        instance=True,
    ),
)
