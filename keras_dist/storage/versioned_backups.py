"""Versioned backup files in a directory, written atomically and verified by digest.

A file name carries the version and a digest of the bytes, so there is no index that could disagree
with the files. Does not communicate: only the root reads and writes.
"""

import hashlib
import logging
import pathlib
import re
from collections.abc import Callable
from typing import BinaryIO

from keras_dist import errors, runtime
from keras_dist.storage.atomic_write import beside, move

#: remedy for a backup that cannot be read
REMEDY = "Remove the backup to start over."

SUFFIX = ".npz"
NAME = re.compile(r"(\d{8,})-([0-9a-f]{32})\.\w+")

_log = logging.getLogger("keras_dist")


def add(
    directory: pathlib.Path,
    save: Callable[[BinaryIO], None],
    previous: pathlib.Path | None,
    suffix: str = SUFFIX,
    number: int | None = None,
    keep: int = 1,
) -> pathlib.Path:
    """Writes a new version; then removes all older versions except one, or as many as are kept.

    The previous version survives an interruption at any point.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for partial in directory.glob(f".*{suffix}"):
        partial.unlink(missing_ok=True)  # of a writer that was killed
    known = newest_first(directory, suffix)
    if number is None:
        number = number_of(known[0]) + 1 if known else 1
    start = known.index(previous) if previous in known else 0
    kept = known[start : start + keep]
    with beside(directory / f"backup{suffix}") as partial:
        with partial.open("xb") as file:
            save(file)
        path = directory / f"{number:08d}-{_digest(partial)}{suffix}"
        move(partial, path)
    for old in known:
        if old not in kept:
            old.unlink(missing_ok=True)
    return path


def newest_first(directory: pathlib.Path, suffix: str = SUFFIX) -> list[pathlib.Path]:
    """Returns the paths of all versions in a directory, intact or not."""
    found = [path for path in directory.glob(f"*{suffix}") if NAME.fullmatch(path.name)]
    return sorted(found, key=number_of, reverse=True)


def number_of(path: pathlib.Path) -> int:
    """Returns the number of a version."""
    return int(path.name.partition("-")[0])


def newest_intact(
    directory: pathlib.Path, other: pathlib.Path | None = None
) -> pathlib.Path | None:
    """Returns the newest intact version; logs a warning that names damaged ones."""
    found = newest_first(directory)
    if other is not None:
        found = [path for path in found if number_of(path) > number_of(other)]
    intact = next((path for path in found if is_intact(path)), other)
    damaged = found[: found.index(intact)] if intact in found else found
    names = ", ".join(str(path) for path in damaged)
    if damaged and intact is None:
        expected = f"an intact backup in {directory}"
        received = f"{names}, damaged: the digest does not match"
        raise errors.CheckpointError(runtime.where(), expected, received, REMEDY)
    if damaged:
        _log.warning(
            "%s is damaged: the digest does not match. Training resumes from an earlier backup, "
            "%s.",
            names,
            intact,
        )
    return intact


def is_intact(path: pathlib.Path) -> bool:
    """Returns whether a version can be read and matches its digest."""
    try:
        return f"-{_digest(path)}" in path.name
    except OSError:
        return False


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
