"""Private names of Python's standard library."""

import platform
import sys
import threading
from typing import Any

from keras_dist._compat.contract import Name


def version() -> str:
    """Returns the name and the version of the interpreter."""
    return f"Python {platform.python_version()}"


def is_mine(lock: Any) -> bool:
    """Returns whether the calling thread holds an `RLock`."""
    return bool(lock._is_owned())


def is_foreign_thread(thread: threading.Thread) -> bool:
    """Returns whether a thread was not started by Python's `threading`."""
    return isinstance(thread, threading._DummyThread)


def inherits_script() -> bool:
    """Returns whether a `multiprocessing` child runs the parent's script in this process."""
    process: Any = sys.modules.get("multiprocessing.process")  # always imported in a child
    # A child has the attribute only while it prepares; other processes never have it.
    return process is not None and "_inheriting" in vars(process.current_process())


CONTRACT = (
    Name(
        lambda: type(threading.RLock()),
        "_is_owned",
        "to start a collective that is part of another one",
        "a collective inside another one would wait for itself",
        (),
    ),
    Name(
        "threading",
        "_DummyThread",
        "to exclude threads of frameworks when the script's threads are counted",
        "the queue of collectives would wait for threads of a framework",
    ),
    Name(
        "multiprocessing.spawn",
        "_inheriting",
        "to recognise a child of multiprocessing while it imports the script",
        "the child would join the job as a rank",
        instance=True,
    ),
)
