"""The files in which the ranks of a job record: their names, and what is in them. Pure.

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

OPERATION, OPEN = 0, 2  # kinds of records, as `keras_dist._engine.timeline` has them


def path_of_restart(path: str, restart: int) -> str:
    """Returns where a job that was started anew writes; the file of the first try stays."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.restart{restart}{suffix}" if restart else path


def part_path(path: str, rank: int) -> str:
    """Returns where a rank records that is part of the timeline at `path`."""
    return f"{path}.rank{rank}.part"


def parts_of(path: str, job: str) -> list[str]:
    """Returns the parts of a job that are here, in the order of their ranks."""
    found = glob.glob(f"{glob.escape(path)}.rank*.part")
    heads = {part: head_of(part) for part in found}
    mine = [part for part in found if heads[part].get("job") == job]
    return sorted(mine, key=lambda part: heads[part]["rank"])


def head_of(part: str) -> dict[str, Any]:
    """Returns what the first line of a part says; nothing when there is none."""
    try:
        with open(part) as file:
            line = file.readline()
        return json.loads(line) if line.endswith("\n") else {}
    except (OSError, ValueError):
        return {}


def lines_of(part: str) -> Iterator[Any]:
    """Yields what is in a part, line by line: lists of whole numbers, and dicts.

    Raises:
        DataError: it is damaged elsewhere than at its end.
    """
    with open(part, errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return  # the rank was killed while it wrote
            try:
                yield json.loads(line)
            except ValueError:
                raise damaged(part, f"line {number} is not what keras_dist writes") from None


def damaged(path: str, received: str) -> errors.DataError:
    """Returns the error about a file that cannot be read as a timeline."""
    remedy = "Record it again, with KERAS_DIST_TIMELINE; parts of it may open in a viewer."
    expected = f"a timeline of keras_dist in {path}"
    return errors.DataError(errors.explain("[keras-dist timeline]", expected, received, remedy))
