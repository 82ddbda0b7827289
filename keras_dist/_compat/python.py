"""Private names of Python's standard library, and attributes that are set past `__setattr__`."""

import contextlib
import importlib.machinery
import io
import os
import platform
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_dist._compat.contract import Owner


def version() -> str:
    """Returns the name and the version of the interpreter."""
    return f"Python {platform.python_version()}"


def is_mine(lock: Any) -> bool:
    """Returns whether the calling thread holds an `RLock`."""
    return bool(lock._is_owned())


def is_named_tuple(data: Any) -> bool:
    """Returns whether an object is a tuple of a class that `collections.namedtuple` has made."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Returns a context in which attributes of an instance have values, untracked by Keras."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)


def is_foreign_thread(thread: threading.Thread) -> bool:
    """Returns whether a thread was not started by Python's `threading`."""
    return isinstance(thread, threading._DummyThread)


def inherits_script() -> bool:
    """Returns whether a `multiprocessing` child runs the parent's script in this process."""
    process: Any = sys.modules.get("multiprocessing.process")  # always imported in a child
    # A child has the attribute only while it prepares; other processes never have it.
    return process is not None and "_inheriting" in vars(process.current_process())


def run_as_main(words: list[str]) -> None:
    """Runs `[script, argument, ...]` or `["-m", module, argument, ...]` as `python` would."""
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        _run(lambda: runpy._run_module_as_main(words[1]))  # type: ignore[attr-defined]
        return
    path = os.path.abspath(words[0])
    sys.argv[:] = words
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    _run(lambda: exec(code, vars(main)))


def _run(program: Callable[[], Any]) -> None:
    """Runs a program; the traceback of an error begins in it."""
    try:
        program()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (
            __file__,
            "<frozen runpy>",
        ):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


CONTRACT = (
    Owner("runpy").method(
        "_run_module_as_main(mod_name)",
        "to run `-m module` in a process that has stood by",
        "a restart would run the module under another name than `__main__`",
    ),
    Owner(lambda: type(threading.RLock())).method(
        "_is_owned()",
        "to start a collective that is part of another one",
        "a collective inside another one would wait for itself",
    ),
    Owner("threading").name(
        "_DummyThread",
        "to exclude threads of frameworks when the script's threads are counted",
        "the queue of collectives would wait for threads of a framework",
    ),
    Owner("multiprocessing.spawn").attribute(
        "_inheriting",
        "to recognise a child of multiprocessing while it imports the script",
        "the child would join the job as a rank",
    ),
)
