"""Files whose rows are sharded: by shard, if there are enough, otherwise one by one.

A shard is the unit of reading: a file, a Parquet row group, an image. The rows of all shards are
numbered from 0. Shards of arrays are loaded whole; samples are decoded one by one.
"""

import collections
import concurrent.futures
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.epochs import kind_of
from keras_dist.data.files import FileIndex, Found, Unreadable
from keras_dist.data.indexed import IndexedBatches, for_keras
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.partition import Plan
from keras_dist.data.shard_options import Fact, ShardOptions

MIXED = 4  # files or row groups that are shuffled together and stay in memory


class Location(NamedTuple):
    """The location of a shard."""

    file: int
    inner: int
    path: str


# Returns new arrays in the structure of the data, given the shard of each row, and the number of
# the row in it.
Read = Callable[[np.ndarray, np.ndarray], Any]
Load = Callable[[Location], dict[str, np.ndarray]]
Key = Any  # hashable; identifies a sample
Sample = Any  # nested tuples and dicts of arrays


class ShardFiles(Protocol):
    """A file format."""

    def look(self, path: str) -> Found:
        """Inspects a file; may raise any exception if the file is damaged."""

    def reader(self, locations: Sequence[Location], found: Found) -> Read:
        """Returns the function that reads rows of the shards."""


class ShardSource(FileIndex):
    """Files of one format, sharded by rows; `mixed` shards are shuffled together."""

    def __init__(
        self,
        files: ShardFiles,
        paths: Sequence[str],
        options: ShardOptions,
        unreadable: Unreadable,
        facts: Sequence[Fact],
        own: bool = False,
        visible: bool = True,
        mixed: int = MIXED,
    ):
        if own and options.shuffle == "global":
            raise errors.ArgumentError(
                "shuffle to be True or False for files, where each rank has its own",
                "shuffle='global'",
                "Pass samples to shard(), which have a global order.",
            )
        super().__init__(files.look, paths, options, unreadable, facts, own, visible)
        self._files, self._mixed = files, mixed

    def part(self, held: Sequence[Any]) -> Any:
        """Returns the batches of this rank as data for `fit`, given the indexes of all ranks."""
        options = self.options
        by_rank = self.found(held)
        mine = by_rank[options.rank if self.own else 0]
        shards = [
            (Location(number, inner, self.paths[number]), length)
            for number, found in mine.items()
            for inner, length in enumerate(found.lengths)
            if length
        ]
        lengths = np.array([length for _, length in shards], np.int64)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        if not self.own:
            options.need_samples(int(lengths.sum()))
        order, plan = self._order(lengths, by_rank)
        options.need_steps(plan.steps)
        plan = plan.limited(options.steps or plan.steps)
        first = next(found for files in by_rank for found in files.values())
        read = self._files.reader([location for location, _ in shards], first)

        def take(rows: np.ndarray) -> Any:
            numbers = np.searchsorted(ends, rows, side="right")
            return read(numbers, rows - begins[numbers])

        batch = options.size * (options.batch_size or 1) if options.way == "global" else None
        kind = kind_of(options.lasting(self.facts))
        batches = IndexedBatches(first.example, take, plan, order.of, kind, batch)
        self.epochs = batches.epochs
        return for_keras(batches)

    def _order(
        self, lengths: np.ndarray, by_rank: Sequence[dict[int, Found]]
    ) -> tuple["ShardOrder", Plan]:
        """Returns the rows of this rank in order, and the sizes of its batches."""
        options, mixed, batch_size = self.options, self._mixed, self.options.batch_size or 1
        rank, size = options.rank, options.size
        if options.way == "global":
            order = ShardOrder(lengths, 0, 1, mixed, (options.seed,), slice(rank, None, size))
            return order, options.plan(int(lengths.sum()), batch_size)
        if self.own:
            counts = [sum(sum(found.lengths) for found in files.values()) for files in by_rank]
            rank, size = 0, 1
        else:
            counts = [int(ShardOrder(lengths, each, size).counts.sum()) for each in range(size)]
        key = (options.seed, options.rank) if options.way == "rank" else None
        return ShardOrder(lengths, rank, size, mixed, key), options.spread(counts, batch_size)


class ShardOrder:
    """The rows of a rank in each epoch: shard i belongs to rank `i % size`.

    With fewer shards than ranks, row i belongs to rank `i % size`. `key` holds the seeds of the
    order, `None` for that of the files, and `turns` the positions in it that the rank takes.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        rank: int,
        size: int,
        mixed: int = 1,
        key: Sequence[int] | None = None,
        turns: slice = slice(None),
    ):
        begins = np.cumsum(lengths) - lengths
        if len(lengths) >= size:
            self._firsts, self.counts, self._stride = begins[rank::size], lengths[rank::size], 1
        else:
            first = (rank - begins) % size
            self._firsts, self._stride = begins + first, size
            self.counts = np.maximum(0, -((first - lengths) // size))
        self._mixed, self._key, self._turns = mixed, key, turns

    def of(self, plan: Plan, epoch: int) -> np.ndarray:
        """Returns the numbers of the rows of an epoch, in order: int64 of shape `(plan.count,)`."""
        shards = np.arange(len(self.counts))
        if self._key is None:
            rows = self._rows(shards)
        else:
            random = np.random.default_rng([*self._key, epoch])
            shards = random.permutation(shards)
            windows = np.split(shards, range(self._mixed, len(shards), self._mixed))
            rows = np.concatenate([random.permutation(self._rows(window)) for window in windows])
        # With "pad" a rank repeats its first rows.
        return np.resize(rows[self._turns], plan.count)

    def _rows(self, shards: np.ndarray) -> np.ndarray:
        counts = self.counts[shards]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self._firsts[shards], counts) + self._stride * within


class CachedShards:
    """Reads rows of shards of arrays, of which the latest stay in memory."""

    def __init__(self, load: Load, locations: Sequence[Location], found: Found):
        self._load, self._locations, self._found = load, locations, found
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
        while len(self._cache) >= MIXED:
            self._cache.popitem(last=False)
        location = self._locations[shard]
        try:
            self._cache[shard] = self._load(location)
        except errors.DataError:  # of what the file holds
            raise
        except Exception as failure:  # a damaged file may raise anything
            raise errors.DataError(
                f"{location.path} to be readable",
                f"{type(failure).__name__}: {failure}",
                "The file is damaged, or has changed since the data set was created.",
            ) from failure
        return self._cache[shard]


class Decoder:
    """Makes batches of samples, each decoded by one of several threads."""

    def __init__(
        self,
        decode: Callable[[Key], Sample],
        name: Callable[[Key], str],
        unreadable: Unreadable,
    ):
        self._decode, self._name, self._unreadable = decode, name, unreadable
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._skipped: set[Key] = set()
        self._last: Sample | None = None

    def batch(self, keys: Sequence[Key]) -> Sample:
        samples = list(self._threads().map(self._attempt, keys))
        decoded = [sample for sample in samples if sample is not None]
        if decoded:
            self._last = decoded[-1]
        elif self._last is not None:
            decoded = [self._last]
        else:
            reason = "no sample has been decoded successfully"
            raise self._error(self._name(keys[0]), reason, "Check the files and the decoder.")
        filled = [
            sample if sample is not None else decoded[n % len(decoded)]
            for n, sample in enumerate(samples)
        ]
        columns = [list(leaves(sample, "")) for sample in filled]
        arrays = [np.stack([leaf for _, leaf in column]) for column in zip(*columns, strict=True)]
        return mapped(lambda _: arrays.pop(0), filled[0])

    def _attempt(self, key: Key) -> Sample | None:
        try:
            return self._decode(key)
        except Exception as failure:  # damaged data may raise anything
            reason = f"{type(failure).__name__}: {failure}"
            if self._unreadable == "raise":
                remedy = "Replace the file, or pass unreadable='skip'."
                raise self._error(self._name(key), reason, remedy) from failure
            self._report(key, reason)
            return None

    def _report(self, key: Key, reason: str) -> None:
        with self._lock:
            if key in self._skipped:
                return
            self._skipped.add(key)
            count = len(self._skipped)
        # Printed by this rank, as the other ranks do not know of it.
        text = f"{self._name(key)} is skipped, {count} so far on this rank: {reason}"
        line = f"keras_dist: {runtime.where()} {text}"
        # File names may hold bytes that are not valid text.
        print(line.encode(errors="backslashreplace").decode(), flush=True)

    def _error(self, name: str, reason: str, remedy: str) -> errors.DataError:
        return errors.DataError(f"{name} to be readable", reason, remedy)

    def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():  # threads do not survive a fork
                self._pid = os.getpid()
                count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
                self._pool = concurrent.futures.ThreadPoolExecutor(count, "keras_dist decoder")
            return self._pool


def found_of(length: int, sample: Sample) -> Found:
    """Describes a file of `length` samples that are all like `sample`."""
    arrays = [(path, np.asarray(leaf)) for path, leaf in leaves(sample, "sample")]
    names = iter([path for path, _ in arrays])
    layout = tuple((path, array.dtype.str, array.shape) for path, array in arrays)
    return Found((length,), layout, mapped(lambda _: next(names), sample))
