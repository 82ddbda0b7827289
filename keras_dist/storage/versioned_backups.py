"""The backups in a directory, one generation after another: which is the newest whole one?

The name of each carries its number and a digest of its bytes. So there is no list of them that
could be of another moment than they are: a file is there under its name, whole, or it is not.
Knows no model and moves nothing between ranks; whoever reads and writes is the root.
"""

import hashlib
import logging
import pathlib
import re
from collections.abc import Callable
from typing import BinaryIO

from keras_dist import errors, runtime
from keras_dist.storage.atomic_write import beside, move

__all__ = ["ANEW", "add", "is_whole", "newest_first", "newest_whole"]

#: the remedy where a backup cannot be read
ANEW = "Remove it to begin anew."

SUFFIX = ".npz"
NAME = re.compile(rf"(\d{{8,}})-([0-9a-f]{{32}}){re.escape(SUFFIX)}")

_log = logging.getLogger("keras_dist")


def add(
    directory: pathlib.Path, save: Callable[[BinaryIO], None], before: pathlib.Path | None
) -> pathlib.Path:
    """Writes a new generation; then all others but one are removed.

    Whenever it is interrupted, the one before is there, and the new one is or is not.

    Args:
        directory: where to; it is made when it is missing.
        save: writes into a file.
        before: the generation before, which is known to be whole and is kept; `None` where that
            is not known: then the newest is kept.

    Returns:
        The path of the new one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f".*{SUFFIX}"):
        left.unlink(missing_ok=True)  # by a writer that was killed
    known = newest_first(directory)
    number = _number(known[0]) + 1 if known else 1
    before = before or next(iter(known), None)
    with beside(directory / f"backup{SUFFIX}") as hidden:
        with hidden.open("xb") as file:
            save(file)
        path = directory / f"{number:08d}-{_digest(hidden)}{SUFFIX}"
        move(hidden, path)
    for old in known:
        if old != before:
            old.unlink(missing_ok=True)
    return path


def newest_first(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths of all generations in a directory, whole or not."""
    found = [path for path in directory.glob(f"*{SUFFIX}") if NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def newest_whole(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the newest generation that is whole; those after it are named in a warning.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    found = newest_first(directory)
    whole = next((path for path in found if is_whole(path)), None)
    damaged = found if whole is None else found[: found.index(whole)]
    names = ", ".join(str(path) for path in damaged)
    if damaged and whole is None:
        expected = f"a whole backup in {directory}"
        received = f"{names}: the bytes are not those that were written"
        raise errors.CheckpointError(errors.explain(runtime.where(), expected, received, ANEW))
    if damaged:
        _log.warning(
            "%s is damaged: the bytes are not those that were written. Training goes on from "
            "the backup before it, %s.",
            names,
            whole,
        )
    return whole


def is_whole(path: pathlib.Path) -> bool:
    """Tells whether a generation can be read and holds the bytes that were written."""
    try:
        return f"-{_digest(path)}" in path.name
    except OSError:
        return False


def _number(path: pathlib.Path) -> int:
    return int(path.name.partition("-")[0])


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
