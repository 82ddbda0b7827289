"""File arguments: a path, a glob pattern, or a list of them."""

import glob
import os
from collections.abc import Sequence

from keras_dist import errors
from keras_dist.data.shard_options import ShardOptions

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]


def expanded(paths: Paths, options: ShardOptions) -> list[str]:
    """Expands patterns into paths."""
    found = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else list(paths):
        if not isinstance(path, str | os.PathLike):
            raise options.wrong_kind("a path", path)
        name = os.fspath(path)
        is_pattern = glob.has_magic(name) and not os.path.exists(name)
        matches = sorted(glob.glob(name, recursive=True)) if is_pattern else [name]
        if not matches:
            remedy = "Check the path on every node."
            raise errors.DataError(options.where, f"files that match {name}", "none", remedy)
        found += matches
    if not found:
        raise errors.DataError(options.where, "paths of files", "none", "Pass at least one.")
    return found
