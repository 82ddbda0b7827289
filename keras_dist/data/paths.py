"""File arguments: a path, a glob pattern, or a list of them."""

import glob
import os
from collections.abc import Sequence

from keras_dist import errors
from keras_dist.data.shard_options import ShardOptions

__all__ = ["Path", "Paths", "expanded"]

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]


def expanded(paths: Paths, options: ShardOptions) -> list[str]:
    """Expands patterns into paths.

    Args:
        paths: a path, a pattern such as `"train/*.npz"`, or a list of them.
        options: options of the data set, for error messages.

    Returns:
        The paths in the given order; the matches of each pattern are sorted.

    Raises:
        ArgumentTypeError: an item is not a path.
        DataError: a pattern matches no file, or the list is empty.
    """
    found = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else list(paths):
        if not isinstance(path, str | os.PathLike):
            raise options.wrong_kind("a path", path)
        name = os.fspath(path)
        is_pattern = glob.has_magic(name) and not os.path.exists(name)
        matches = sorted(glob.glob(name, recursive=True)) if is_pattern else [name]
        if not matches:
            remedy = "Check the path on every node."
            raise errors.DataError(options.explain(f"files that match {name}", "none", remedy))
        found += matches
    if not found:
        raise errors.DataError(options.explain("paths of files", "none", "Pass at least one."))
    return found
