"""Running the cells of a notebook on this rank."""

import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import nbformat
from nbformat.v4 import new_output

from keras_dist import errors
from keras_dist.launch.interactive.rank import printing_to
from keras_dist.launch.notebook import document
from keras_dist.launch.notebook.shell import Outputs, Shell, Stream, start_shell
from keras_dist.runtime import launch_environment

SKIPPED, MAY_FAIL = "skip-execution", "raises-exception"  # tags of nbclient


class _Failed(NamedTuple):
    place: int  # index among all cells
    number: int  # execution count, as in In [number]
    error: BaseException
    output: dict[str, Any]


def run_notebook(path: pathlib.Path, output: pathlib.Path, values: Mapping[str, Any]) -> int:
    """Runs a notebook in this process, which is a rank of a job; a failing cell ends all ranks."""
    # The root writes the notebook after every cell; others write their output to logs beside it.
    rank, announced = launch_environment.announced_rank() or 0, launch_environment.announced_size()
    ranks = 1 if announced is None else announced.size
    where = f"[rank {rank} of {ranks}]"
    path, output = path.absolute(), output.absolute()
    notebook = document.read(path, where)
    document.inject_parameters(notebook, values, where)
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise errors.ArgumentError(
            where,
            "a directory to write the executed notebook to",
            str(output.parent),
            "Pass another path by --output.",
        )
    log = output.with_suffix(f".rank{rank}.log")
    os.chdir(path.parent)
    sys.argv = [str(path)]
    with printing_to(log) if rank else contextlib.nullcontext():
        outputs = Outputs(sys.stdout)
        save = _writer(notebook, output, outputs, ranks) if rank == 0 else lambda: None
        with (
            contextlib.redirect_stdout(Stream("stdout", outputs, sys.stdout)),
            contextlib.redirect_stderr(Stream("stderr", outputs, sys.stderr)),
            open(os.devnull) as nothing,
        ):
            sys.stdin = nothing
            failed = _run_cells(notebook, start_shell(outputs), save)
    if failed is None:
        return 0
    if isinstance(failed.error, SystemExit):
        raise failed.error
    if rank:
        failed.output["traceback"].insert(0, where)
        document.send_failure(output, rank, {"cell": failed.place, "output": failed.output})
    return _end(failed, notebook, where, log if rank else output)


def _run_cells(
    notebook: nbformat.NotebookNode, shell: Shell, save: Callable[[], None]
) -> _Failed | None:
    """Runs the cells up to the first failure that is not allowed."""
    to_run = [
        (place, cell)
        for place, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and cell.source.strip() and SKIPPED not in _tags(cell)
    ]
    for _, cell in to_run:
        cell.update(outputs=[], execution_count=None)
    save()
    for place, cell in to_run:
        cell.execution_count = shell.execution_count
        shell.outputs.begin(cell)
        result = shell.run_cell(cell.source, store_history=True)
        save()
        error = result.error_before_exec or result.error_in_exec
        if error is not None and MAY_FAIL not in _tags(cell):
            shown = [output for output in cell.outputs if output.output_type == "error"]
            name, text = type(error).__name__, str(error)
            output = shown[-1] if shown else new_output("error", name, text, traceback=[])
            return _Failed(place, cell.execution_count, error, dict(output))
    return None


def _tags(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def _writer(
    notebook: nbformat.NotebookNode, output: pathlib.Path, outputs: Outputs, ranks: int
) -> Callable[[], None]:
    """Returns a function that writes the notebook with failures of other ranks."""
    run = document.begin(notebook, ranks)

    def save() -> None:
        with outputs.lock:
            document.write(notebook, output)

    def receive(told: dict[str, Any]) -> None:
        with outputs.lock:
            notebook.cells[told["cell"]].outputs.append(nbformat.from_dict(told["output"]))
            save()

    save()
    document.listen_for_failures(output, run, receive)
    return save


def _end(failed: _Failed, notebook: nbformat.NotebookNode, where: str, place: pathlib.Path) -> int:
    """Reports the failure and ends all ranks; returns if there is one rank."""
    if isinstance(failed.error, KeyboardInterrupt):
        sys.excepthook(KeyboardInterrupt, failed.error, None)
        return 128 + signal.SIGINT
    lines = notebook.cells[failed.place].source.strip().splitlines()
    error = errors.CellError(
        where,
        f"cell [{failed.number}] of the notebook, `{lines[0]}`, to succeed",
        f"{type(failed.error).__name__}: {failed.error}",
        f"The traceback is in {place}.",
    )
    sys.excepthook(errors.CellError, error, None)
    return 1
