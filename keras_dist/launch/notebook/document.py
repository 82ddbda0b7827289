"""Notebook files: reading with checks, atomic writing, parameters, and failures of other ranks.

When a cell fails on another rank, the root may be inside a collective while the job is about to
end. So the failing rank writes a file beside the notebook and waits until a thread of the root has
read it. The file holds the start time of its run, because files of an earlier run may be left.
"""

import ast
import contextlib
import datetime
import glob
import json
import keyword
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import nbformat

from keras_dist import errors
from keras_dist.storage import atomic_write

VERSION = 4  # format version; older notebooks are converted
NOTE = "keras_dist"  # in the metadata
DEFAULTS, INJECTED = "parameters", "injected-parameters"  # tags
TURN_SECONDS = 0.1
TAKEN_SECONDS = 5.0  # the root may hold the interpreter, or be gone


def read(path: pathlib.Path, where: str) -> nbformat.NotebookNode:
    """Reads a notebook."""
    try:
        notebook = nbformat.read(path, VERSION)
        nbformat.validate(notebook)
    except Exception as error:  # errors of the file system, of JSON or of the format
        first = (str(error).splitlines() or [""])[0]
        raise errors.ArgumentError(
            where,
            f"{path} to be a notebook",
            f"{type(error).__name__}: {first}",
            "Pass a file that Jupyter can open.",
        ) from None
    language = notebook.metadata.get("kernelspec", {}).get("language", "python")
    if language != "python":
        raise errors.ArgumentError(
            where,
            f"{path} to be a notebook of Python",
            f"one of {language}",
            "Run notebooks of other languages with their kernels.",
        )
    return notebook


def write(notebook: nbformat.NotebookNode, path: pathlib.Path) -> None:
    """Writes a notebook atomically."""
    with atomic_write.beside(path) as other:
        nbformat.write(notebook, other)
        atomic_write.move(other, path)


def begin(notebook: nbformat.NotebookNode, ranks: int) -> str:
    """Records start time and number of ranks in the notebook; returns the time."""
    moment = datetime.datetime.now(datetime.UTC).isoformat()
    notebook.metadata[NOTE] = {"began": moment, "ranks": ranks}
    return moment


def start_time(path: pathlib.Path) -> str | None:
    """Returns the recorded start time of a notebook file; `None` without one."""
    try:
        return str(json.loads(path.read_text())["metadata"][NOTE]["began"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def inject_parameters(
    notebook: nbformat.NotebookNode, parameters: Mapping[str, Any], where: str
) -> None:
    """Inserts a cell of parameters after the tagged one or at the top; replaces an earlier one."""
    if not parameters:
        return
    lines = [f"{name} = {_literal(name, value, where)}" for name, value in parameters.items()]
    cell = nbformat.v4.new_code_cell("\n".join(["# Parameters", *lines]))
    cell.metadata.tags = [INJECTED]
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        del cell["id"]
    before, defaults = _cell_tagged(notebook, INJECTED), _cell_tagged(notebook, DEFAULTS)
    if before is not None:
        notebook.cells[before] = cell
    else:
        notebook.cells.insert(0 if defaults is None else defaults + 1, cell)


def _cell_tagged(notebook: nbformat.NotebookNode, tag: str) -> int | None:
    tagged = (
        index for index, cell in enumerate(notebook.cells) if tag in cell.metadata.get("tags", [])
    )
    return next(tagged, None)


def _literal(name: str, value: Any, where: str) -> str:
    try:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(name)
        if isinstance(value, float) and repr(value) in ("inf", "-inf", "nan"):
            return f"float({repr(value)!r})"
        ast.literal_eval(repr(value))
        return repr(value)
    except (ValueError, SyntaxError):
        raise errors.ArgumentError(
            where,
            "parameters with Python identifiers as names and JSON values",
            f"{name!r}: {value!r}",
            "Write it as -p NAME VALUE, or pass text by -r.",
        ) from None


def send_failure(notebook: pathlib.Path, rank: int, failure: dict[str, Any]) -> None:
    """Sends a failure to the root; returns after the root has read it, or after a timeout."""
    path, told = _failure_path(notebook, str(rank)), None
    end = time.monotonic() + TAKEN_SECONDS
    with contextlib.suppress(OSError):  # the console shows it as well
        while time.monotonic() < end:
            taken = not path.exists()
            run = start_time(notebook)
            if run is not None and run != told:  # replaces the file of an earlier run
                with atomic_write.beside(path) as other:
                    other.write_text(json.dumps({"run": run, "failure": failure}))
                    atomic_write.move(other, path)
                told = run
            elif told is not None and taken:
                break
            time.sleep(TURN_SECONDS)
        path.unlink(missing_ok=True)


def listen_for_failures(
    notebook: pathlib.Path, run: str, hear: Callable[[dict[str, Any]], None]
) -> None:
    """Receives failures of other ranks in a thread, until the process ends."""

    def look() -> None:
        while True:
            time.sleep(TURN_SECONDS)
            pattern = f"{glob.escape(_failure_path(notebook, '').name)}*"
            for path in sorted(notebook.parent.glob(pattern)):
                told = json.loads(path.read_text())
                if told.get("run") == run:
                    hear(told["failure"])
                path.unlink(missing_ok=True)

    threading.Thread(target=look, name="keras_dist notebook", daemon=True).start()


def _failure_path(notebook: pathlib.Path, rank: str) -> pathlib.Path:
    return notebook.with_name(f".{notebook.name}.failed-{rank}")
