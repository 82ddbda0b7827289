"""`keras-dist migrate`: shows the changes of a script for Horovod as a diff."""

import argparse
import difflib
import importlib.util
import io
import pathlib
import shutil
import sys
import tokenize
from collections.abc import Iterator
from typing import Any

from keras_dist import errors
from keras_dist.storage import atomic_write

PROPOSED = 1
BY_HAND = 3  # 2 is for files that are not scripts

DESCRIPTION = """Shows the changes that convert a Horovod script to keras_dist as a diff, and lists
the lines that need manual changes. Exit code 0: no changes are needed, or they were written; 1:
changes are proposed; 2: a file is not a script; 3: no further changes are proposed, but lines need
manual changes."""


def add_to(commands: Any, name: str) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(name, description=DESCRIPTION)
    parser.set_defaults(act=_migrate)
    parser.add_argument("scripts", type=pathlib.Path, nargs="+", metavar="script.py")
    parser.add_argument("--write", action="store_true", help="write the changes to the scripts")


def _migrate(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("libcst") is None:
        expected, remedy = "libcst", "Install it: pip install 'keras_dist[migrate]'"
        raise errors.ArgumentError("[keras-dist migrate]", expected, "no such package", remedy)
    from keras_dist.migrate import rewrite

    read = {path: _read(path) for path in options.scripts}
    rewritten = {path: rewrite(source, str(path)) for path, (source, _) in read.items()}
    proposed = False
    for path, (wanted, notes) in rewritten.items():
        source, encoding = read[path]
        sys.stdout.writelines(_diff(source, wanted, str(path)))
        for note in notes:
            print(f"{path}:{note.line}: {note.text}", file=sys.stderr)
        if wanted != source:
            proposed = True
            if options.write:
                _write(path, wanted, encoding)
    by_hand = sum(len({note.line for note in notes}) for _, notes in rewritten.values())
    if by_hand:
        lines = "1 line is" if by_hand == 1 else f"{by_hand} lines are"
        print(f"keras-dist migrate: {lines} left to change manually.", file=sys.stderr)
    if proposed and not options.write:
        return PROPOSED
    return BY_HAND if by_hand else 0


def _diff(before: str, after: str, name: str) -> Iterator[str]:
    """Yields a unified diff, also where the last line has no newline."""
    # str.splitlines would split at form feeds.
    old, new = (io.StringIO(text).readlines() for text in (before, after))
    for line in difflib.unified_diff(old, new, name, name):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _read(path: pathlib.Path) -> tuple[str, str]:
    """Returns the text of a script, with a byte order mark if present, and its encoding."""
    if path.suffix == ".ipynb":  # its JSON would be read as an expression of Python
        raise _error(f"{path}, a notebook", "Save it as a script in Jupyter, and pass that file.")
    try:
        content = path.read_bytes()
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0].removesuffix("-sig")
        return content.decode(encoding), encoding
    except OSError as error:
        raise _error(f"{path}: {error}", "Pass a file.") from None
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        remedy = (
            "Save it as UTF-8, or declare its encoding in the first line: # -*- coding: latin-1 -*-"
        )
        raise _error(f"{path}: {error}", remedy) from None


def _error(received: str, remedy: str) -> errors.ArgumentError:
    return errors.ArgumentError("[keras-dist migrate]", "a script", received, remedy)


def _write(path: pathlib.Path, text: str, encoding: str) -> None:
    target = path.resolve()  # keeps symbolic links
    with atomic_write.beside(target) as new:
        new.write_bytes(text.encode(encoding))
        shutil.copymode(target, new)
        atomic_write.move(new, target)
