"""Parameters of a notebook, injected by the tags of papermill."""

import ast
import keyword
from collections.abc import Mapping
from typing import Any

import nbformat

from keras_dist import errors

DEFAULTS, INJECTED = "parameters", "injected-parameters"


def inject(notebook: nbformat.NotebookNode, parameters: Mapping[str, Any], where: str) -> None:
    """Inserts a cell that assigns parameters after the cell tagged `parameters`, or at the top.

    It replaces a cell that was injected before.
    """
    if not parameters:
        return
    lines = [f"{name} = {_literal(name, value, where)}" for name, value in parameters.items()]
    cell = nbformat.v4.new_code_cell("\n".join(["# Parameters", *lines]))
    cell.metadata.tags = [INJECTED]
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        del cell["id"]
    before, defaults = _place(notebook, INJECTED), _place(notebook, DEFAULTS)
    if before is not None:
        notebook.cells[before] = cell
    else:
        notebook.cells.insert(0 if defaults is None else defaults + 1, cell)


def _place(notebook: nbformat.NotebookNode, tag: str) -> int | None:
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
