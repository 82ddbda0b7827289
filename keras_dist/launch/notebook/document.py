"""Notebook files: reading with checks, and atomic writing."""

import datetime
import json
import pathlib

import nbformat

from keras_dist import errors
from keras_dist.storage import atomic_write

VERSION = 4  # format version; older notebooks are converted
NOTE = "keras_dist"  # in the metadata


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


def executed_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the executed notebook: `nb.executed.ipynb` for `nb.ipynb`."""
    return path.with_name(f"{path.stem}.executed.ipynb")
