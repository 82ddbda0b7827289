"""Paths as users write them: one, several, or a pattern."""

import glob
import os
from collections.abc import Sequence

from keras_dist import errors
from keras_dist.data.shard_options import ShardOptions

__all__ = ["Path", "Paths", "expanded"]

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]


def expanded(paths: Paths, terms: ShardOptions) -> list[str]:
    """Returns the paths that are meant, those of a pattern in sorted order.

    Args:
        paths: a path, a pattern such as `"train/*.npz"`, or a list of them.
        terms: for messages.

    Raises:
        ArgumentTypeError: something is no path.
        DataError: a pattern fits no file, or there is no path at all.
    """
    found = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else list(paths):
        if not isinstance(path, str | os.PathLike):
            raise terms.wrong_kind("a path", path)
        name = os.fspath(path)
        is_pattern = glob.has_magic(name) and not os.path.exists(name)
        fitting = sorted(glob.glob(name, recursive=True)) if is_pattern else [name]
        if not fitting:
            raise errors.DataError(
                terms.explain(f"files like {name}", "none", "Look at the path, on every node.")
            )
        found += fitting
    if not found:
        raise errors.DataError(terms.explain("paths of files", "none", "Pass at least one."))
    return found
