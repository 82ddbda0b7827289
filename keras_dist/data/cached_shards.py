"""Shards of arrays that are loaded completely; the latest stay in memory."""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.file_index import Found
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.shard_source import Location

MIXED = 4  # shards that are shuffled together and stay in memory

Load = Callable[[Location], dict[str, np.ndarray]]


class CachedShards:
    """Reads rows of shards, with a least-recently-used cache of shards."""

    def __init__(self, load: Load, locations: Sequence[Location], found: Found, capacity: int):
        self.example = found.example
        self._found = found
        self._load, self._locations, self._capacity = load, locations, capacity
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[int, dict[str, np.ndarray]]
        self._cache = collections.OrderedDict()

    def read(self, shards: np.ndarray, rows: np.ndarray) -> Any:
        """Returns new arrays whose row i is row `rows[i]` of shard `shards[i]`."""
        batch = {
            name: np.empty((len(rows), *shape), dtype) for name, dtype, shape in self._found.layout
        }
        with self._lock:
            for shard in dict.fromkeys(shards.tolist()):
                here = shards == shard
                arrays = self._arrays(shard)
                for name, array in batch.items():
                    array[here] = arrays[name][rows[here]]
        return mapped(lambda name: batch[name], self._found.names)

    def _arrays(self, shard: int) -> dict[str, np.ndarray]:
        if shard in self._cache:
            self._cache.move_to_end(shard)
            return self._cache[shard]
        while len(self._cache) >= self._capacity:
            self._cache.popitem(last=False)
        location = self._locations[shard]
        try:
            self._cache[shard] = self._load(location)
        except errors.DataError:  # of what the file holds
            raise
        except Exception as failure:  # a damaged file may raise anything
            raise errors.DataError(
                runtime.where(),
                f"{location.path} to be readable",
                f"{type(failure).__name__}: {failure}",
                "The file is damaged, or has changed since the data set was created.",
            ) from failure
        return self._cache[shard]


def named(x: Any, y: Any) -> Any:
    """Returns the names in the structure of a batch: `x`, or `(x, y)`."""
    return x if y is None else (x, y)


def names_in(data: Any) -> list[str]:
    """Returns the distinct names in a structure, in order."""
    return list(dict.fromkeys(name for _, name in leaves(data, "data")))
