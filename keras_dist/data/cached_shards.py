"""Pieces that are loaded completely, a few of which stay in memory."""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.file_index import Found
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.shard_source import Location

__all__ = ["MIXED", "CachedShards", "named", "names_in"]

MIXED = 4  # pieces whose rows are shuffled together, and that stay in memory

Load = Callable[[Location], dict[str, np.ndarray]]


class CachedShards:
    """Rows of pieces that are loaded one by one.

    Args:
        load: returns the arrays of a piece by name.
        places: locations of the pieces.
        found: layout of all pieces.
        keep: number of pieces to keep in memory.
    """

    def __init__(
        self,
        load: Load,
        places: Sequence[Location],
        found: Found,
        keep: int,
    ):
        self.example = found.example
        self._found = found
        self._load, self._places, self._keep = load, places, keep
        self._lock = threading.Lock()
        self._loaded: collections.OrderedDict[int, dict[str, np.ndarray]]
        self._loaded = collections.OrderedDict()

    def read(self, pieces: np.ndarray, rows: np.ndarray) -> Any:
        """Returns a batch of rows.

        Args:
            pieces: int64 array of shape `(rows,)`, the piece of each row.
            rows: int64 array of shape `(rows,)`, the index of each row in its piece.

        Raises:
            DataError: a file is damaged, or has changed.
        """
        batch = {
            name: np.empty((len(rows), *shape), dtype) for name, dtype, shape in self._found.layout
        }
        with self._lock:
            for piece in dict.fromkeys(pieces.tolist()):
                here = pieces == piece
                arrays = self._arrays(piece)
                for name, array in batch.items():
                    array[here] = arrays[name][rows[here]]
        return mapped(lambda name: batch[name], self._found.names)

    def _arrays(self, piece: int) -> dict[str, np.ndarray]:
        if piece in self._loaded:
            self._loaded.move_to_end(piece)
            return self._loaded[piece]
        while len(self._loaded) >= self._keep:
            self._loaded.popitem(last=False)
        place = self._places[piece]
        try:
            self._loaded[piece] = self._load(place)
        except Exception as failure:  # libraries raise anything for damaged files
            raise errors.DataError(
                errors.explain(
                    runtime.where(),
                    f"{place.path} to be readable",
                    f"{type(failure).__name__}: {failure}",
                    "The file is damaged, or was changed after the data set was made.",
                )
            ) from failure
        return self._loaded[piece]


def named(x: Any, y: Any) -> Any:
    """Returns names in the structure of a batch: `x`, or `(x, y)`."""
    return x if y is None else (x, y)


def names_in(data: Any) -> list[str]:
    """Returns the unique names in a structure."""
    return list(dict.fromkeys(name for _, name in leaves(data, "data")))
