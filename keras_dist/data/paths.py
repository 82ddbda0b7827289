"""Paths of a user: one, several, or a pattern."""

import glob
import os
from collections.abc import Sequence

from keras_dist import errors
from keras_dist.data.shard_options import ShardOptions

__all__ = ["Path", "Paths", "expanded"]

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]


def expanded(paths: Paths, terms: ShardOptions) -> list[str]:
    """Returns a list of paths; those of a pattern are sorted.

    Args:
        paths: a path, a pattern such as `"train/*.npz"`, or a list of them.
        terms: options of the data set, for messages.

    Raises:
        ArgumentTypeError: an item is not a path.
        DataError: a pattern matches no file, or there is no path.
    """
    found = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else list(paths):
        if not isinstance(path, str | os.PathLike):
            raise terms.wrong_kind("a path", path)
        name = os.fspath(path)
        is_pattern = glob.has_magic(name) and not os.path.exists(name)
        matches = sorted(glob.glob(name, recursive=True)) if is_pattern else [name]
        if not matches:
            raise errors.DataError(
                terms.explain(f"files like {name}", "none", "Check the path on every node.")
            )
        found += matches
    if not found:
        raise errors.DataError(terms.explain("paths of files", "none", "Pass at least one."))
    return found
