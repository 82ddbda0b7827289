"""The program that ranks run: the words behind the options of a command."""

import argparse
import os
import shutil
import sys

from keras_dist import errors

NOTEBOOK = ("-m", "keras_dist.launch.cli", "run-notebook")

PLAIN = ("-u", "-O", "-OO", "-B")  # options of Python


def add_program(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the program."""
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def program_of(options: argparse.Namespace, command: str) -> list[str]:
    """Returns the command of each rank."""
    words = options.program[1:] if options.program[:1] == ["--"] else options.program
    if options.module is not None:
        words = [sys.executable, "-m", *options.module] if options.module else []
    elif words and words[0].endswith(".py"):
        words = [sys.executable, *words]
    elif words and words[0].endswith(".ipynb"):
        words = [sys.executable, *NOTEBOOK, *words]
    if (missing := _missing(words)) is None:
        return words
    raise errors.ArgumentError(
        f"[keras-dist {command.split()[0]}]",
        "a program to start",
        missing,
        f"Put it after the options, for example: keras-dist {command} python train.py --epochs 3",
    )


def words_of_python(program: list[str]) -> int:
    """Returns the number of words before a script or `-m` that this Python runs; else 0."""
    found = shutil.which(program[0]) or ""
    count = 1
    while program[count:] and program[count] in PLAIN:
        count += 1
    word = "".join(program[count : count + 1])
    runs = (word == "-m" and len(program) > count + 1) or (
        word.endswith(".py") and os.path.isfile(word)
    )
    is_this = os.path.exists(found) and os.path.samefile(found, sys.executable)
    # The Pythons of virtual environments are links to the same file.
    beside = os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)
    return count if runs and is_this and beside else 0


def _missing(words: list[str]) -> str | None:
    """Returns what was given instead of a program; `None` for a valid program."""
    if not words:
        return "none"
    if shutil.which(words[0]) is None:
        return repr(words[0])
    if os.path.basename(words[0]).startswith("python"):
        behind = len(NOTEBOOK) if tuple(words[1 : 1 + len(NOTEBOOK)]) == NOTEBOOK else 0
        script = next((word for word in words[1 + behind :] if not word.startswith("-")), "")
        if script.endswith((".py", ".ipynb")) and not os.path.isfile(script):
            return f"{script!r}, which does not exist"
    return None
