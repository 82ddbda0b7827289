"""`keras-dist checkpoint` and `keras-dist export`: saved training in a terminal."""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from keras_dist import errors
from keras_dist.resume import format

COLUMNS = "{:<20} {:>6} {:>8} {:>6} {:>6} {:>10}  {}"


def add_to(commands: Any, name: str) -> None:
    """Adds one of the commands to the subparsers."""
    if name == "checkpoint":
        description = (
            "Lists the generations of a directory of keras_dist.callbacks.BackupAndRestore or "
            "ShardedCheckpoint, newest first, and compares each file with its digest. Ends with 1 "
            "if no generation is whole."
        )
    else:
        description = (
            "Writes the newest undamaged generation of keras_dist.callbacks.BackupAndRestore or "
            "ShardedCheckpoint as one .keras file, or its weights as a .weights.h5 file. "
            "KERAS_BACKEND selects the backend, as in a script."
        )
    parser = commands.add_parser(name, description=description)
    parser.set_defaults(act=_list if name == "checkpoint" else _export)
    parser.add_argument("directory", help="directory of the generations")
    if name == "export":
        parser.add_argument(
            "file", help="path of the new file, which ends in .keras or .weights.h5"
        )
        parser.add_argument(
            "--generation", type=int, help="number of the generation (default: the newest)"
        )


def _list(options: argparse.Namespace) -> int:
    with _explaining("checkpoint"):
        found = format.newest_first(pathlib.Path(options.directory))
    print(COLUMNS.format("generation", "epoch", "step", "ranks", "parts", "MiB", "state"))
    whole = [path for path in found if _shows_whole(path)]
    if not whole:
        what = "no undamaged generation" if found else "no generation"
        print(f"keras-dist: {options.directory} has {what}.", file=sys.stderr)
    return 0 if whole else 1


def _shows_whole(path: pathlib.Path) -> bool:
    """Prints the row of a generation; returns whether it is whole."""
    about, parts = dict[str, Any](), list[pathlib.Path]()
    try:
        found = format.read(path)
    except (OSError, ValueError, KeyError) as error:
        damage = [f"{path}: {error}"]
    else:
        damage = [f"{path}: the digest does not match"]
        if found is not None:
            about, parts = dict(found.about), list(found.parts)
            damage = format.find_damage(found)
    place = (str(about.get(name, "-")) for name in ("epoch", "step", "ranks"))
    nbytes = sum(each.stat().st_size for each in {path, *parts} if each.exists())
    state = f"damaged: {'; '.join(damage)}" if damage else "whole"
    number = f"{format.number_of(path):08d}"
    print(COLUMNS.format(number, *place, len(parts), f"{nbytes / 2**20:.2f}", state), flush=True)
    return not damage


def _export(options: argparse.Namespace) -> int:
    from keras_dist import checkpoints

    with _explaining("export"):
        checkpoints.export(options.directory, options.file, generation=options.generation)
    return 0


@contextlib.contextmanager
def _explaining(command: str) -> Iterator[None]:
    """Explains errors of the file system, such as a directory that does not exist."""
    try:
        yield
    except errors.CheckpointError:
        raise
    except OSError as error:
        expected = "a directory to read and, for export, a path to write to"
        remedy = "Correct the paths, or the permissions of these directories."
        raise errors.ArgumentError(
            f"[keras-dist {command}]", expected, str(error), remedy
        ) from None
