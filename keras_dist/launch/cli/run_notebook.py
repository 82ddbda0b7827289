"""`keras-dist run-notebook`: runs a notebook on all ranks of a job."""

import argparse
import ast
import importlib.util
import pathlib
from typing import Any

from keras_dist import errors

NEEDED = ("IPython", "nbformat", "yaml")

DESCRIPTION = """Runs the cells of a notebook on this rank, in one process: mpirun -np 4 keras-dist
run-notebook nb.ipynb, or keras-dist run -np 4 nb.ipynb. Rank 0 writes the executed notebook after
each cell; other ranks write their output to log files in the same directory. An exception on any
rank ends all ranks."""


def add_to(commands: Any, name: str) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(name, description=DESCRIPTION)
    parser.set_defaults(act=_run)
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        metavar="FILE",
        help="path of the executed notebook (NOTEBOOK.executed.ipynb, in the same directory)",
    )
    for flags, what in (
        (("-p", "--parameters"), "parameter, inserted after the cell tagged `parameters`"),
        (("-r", "--parameters-raw"), "parameter whose value is a string"),
    ):
        parser.add_argument(
            *flags, nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help=what
        )
    parser.add_argument(
        "-y",
        "-f",
        "--parameters-file",
        type=pathlib.Path,
        metavar="FILE",
        help="YAML file with parameters; -p and -r override them",
    )


def _run(options: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise errors.LaunchError(
            "[keras-dist run-notebook]",
            "the packages that run notebooks",
            f"no {' and no '.join(missing)}",
            "pip install 'keras_dist[notebook]'",
        )
    from keras_dist.launch.notebook.execution import run_notebook

    path = options.notebook
    output = options.output or path.with_name(f"{path.stem}.executed.ipynb")
    values = {} if options.parameters_file is None else _read(options.parameters_file)
    values.update({name: _value(text) for name, text in options.parameters})
    values.update(options.parameters_raw)
    return run_notebook(path, output, values)


def _value(text: str) -> Any:
    """Returns a Python literal, or the text if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _read(path: pathlib.Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise ValueError(f"{type(values).__name__}, not names with values")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise errors.ArgumentError(
            "[keras-dist run-notebook]",
            f"{path} to hold parameters in YAML, `name: value` on each line",
            " ".join(str(error).split()),
            "Correct it, or pass parameters by -p NAME VALUE.",
        ) from None
    return values
