"""The recordings of the ranks of a job: names of the files, and their contents.

`keras_dist._engine.tracing.trace_writer` writes them. The last line of a rank that was killed may
be incomplete.
"""

import glob
import json
import os
from collections.abc import Iterator
from typing import Any

from keras_dist import errors

__all__ = [
    "OPEN",
    "OPERATION",
    "damaged",
    "head_of",
    "lines_of",
    "part_path",
    "parts_of",
    "path_of_restart",
]

OPERATION, OPEN = 0, 2  # kinds of records, as in `_engine.tracing.spans`


def path_of_restart(path: str, restart: int) -> str:
    """Returns the path for a restarted job; the file of the first run stays."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.restart{restart}{suffix}" if restart else path


def part_path(path: str, rank: int) -> str:
    """Returns the recording of a rank for the timeline at `path`."""
    return f"{path}.rank{rank}.part"


def parts_of(path: str, job: str) -> list[str]:
    """Returns the recordings of a job on this file system, in the order of ranks."""
    found = glob.glob(f"{glob.escape(path)}.rank*.part")
    heads = {part: head_of(part) for part in found}
    mine = [part for part in found if heads[part].get("job") == job]
    return sorted(mine, key=lambda part: heads[part]["rank"])


def head_of(part: str) -> dict[str, Any]:
    """Returns the header of a recording; empty without one."""
    try:
        with open(part) as file:
            line = file.readline()
        return json.loads(line) if line.endswith("\n") else {}
    except (OSError, ValueError):
        return {}


def lines_of(part: str) -> Iterator[Any]:
    """Yields the lines of a recording: lists of integers, and dicts."""
    with open(part, errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return  # the rank was killed during a write
            try:
                yield json.loads(line)
            except ValueError:
                raise damaged(part, f"line {number} is not what keras_dist writes") from None


def damaged(path: str, received: str) -> errors.DataError:
    """Returns the error for a file that is not a timeline."""
    remedy = "Record it again, with KERAS_DIST_TIMELINE; parts of it may open in a viewer."
    expected = f"a timeline of keras_dist in {path}"
    return errors.DataError("[keras-dist timeline]", expected, received, remedy)
