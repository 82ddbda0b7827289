"""`keras-dist migrate`: what a script for Horovod has to become, as a diff."""

import argparse
import difflib
import importlib.util
import pathlib
import shutil
import sys
from typing import Any

from keras_dist import errors, whole_files

__all__ = ["add_to"]

PROPOSED = 1

DESCRIPTION = """Shows as a diff what a script for Horovod has to become to use keras_dist, and by
line what has to be looked at by hand. Exit code 0: there is nothing to change, or it has been
written; 1: changes are proposed."""


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("migrate", description=DESCRIPTION)
    parser.set_defaults(act=_migrate)
    parser.add_argument("scripts", type=pathlib.Path, nargs="+", metavar="script.py")
    parser.add_argument("--write", action="store_true", help="change the scripts themselves")


def _migrate(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("libcst") is None:
        expected, remedy = "libcst", "Install it: pip install 'keras_dist[migrate]'"
        raise errors.ArgumentError(
            errors.explain("[keras-dist migrate]", expected, "no such package", remedy)
        )
    from keras_dist.migration import rewrite

    read = {path: _read(path) for path in options.scripts}
    rewritten = {path: rewrite(source, str(path)) for path, source in read.items()}
    proposed = False
    for path, (wanted, notes) in rewritten.items():
        before, after = (text.splitlines(keepends=True) for text in (read[path], wanted))
        sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path)))
        for note in notes:
            print(f"{path}:{note.line}: {note.text}", file=sys.stderr)
        if wanted != read[path]:
            proposed = True
            if options.write:
                _write(path, wanted)
    return PROPOSED if proposed and not options.write else 0


def _read(path: pathlib.Path) -> str:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ArgumentError(
            errors.explain("[keras-dist migrate]", "a script", f"{path}: {error}", "Name a file.")
        ) from None


def _write(path: pathlib.Path, text: str) -> None:
    target = path.resolve()  # a link stays one
    with whole_files.beside(target) as new:
        new.write_bytes(text.encode())
        shutil.copymode(target, new)
        whole_files.move(new, target)
