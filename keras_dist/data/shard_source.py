"""Sharding of files by pieces."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from keras_dist.data.batches import for_keras
from keras_dist.data.epochs import Epochs, kind_of
from keras_dist.data.file_index import FileIndex, Found, Unreadable
from keras_dist.data.file_shards import GlobalShard, RankShard, full_shard, rank_shard, row_counts
from keras_dist.data.files import agreed_spread
from keras_dist.data.partition import plan_samples
from keras_dist.data.shard_batches import ShardBatches, ShardReader
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.spread import Spread


class Location(NamedTuple):
    """The location of a piece."""

    file: int
    inner: int
    path: str


class ShardFiles(Protocol):
    """A file format."""

    mixed: int  # number of pieces that are shuffled together

    def look(self, path: str) -> Found:
        """Inspects a file; may raise any exception if the file is damaged."""

    def reader(self, locations: Sequence[Location], found: Found) -> ShardReader:
        """Returns a reader of the pieces."""


class ShardSource(FileIndex):
    """Files of one format, sharded by pieces."""

    def __init__(
        self,
        files: ShardFiles,
        paths: Sequence[str],
        options: ShardOptions,
        unreadable: Unreadable,
        facts: Sequence[Fact],
        own: bool = False,
        visible: bool = True,
    ):
        if own:
            options.refuse_global_order("files, where each rank has its own")
        super().__init__(files.look, paths, options, unreadable, facts, own, visible)
        self._files = files
        self.epochs = Epochs(kind_of(options.lasting(self.facts)))
        if options.shuffle == "global":
            self.epochs.global_batch = options.size * (options.batch_size or 1)

    def part(self, held: Sequence[Any]) -> Any:
        """Returns the batches of this rank as data for `fit`, given all file indexes."""
        return for_keras(self.batches(held))

    def batches(self, held: Sequence[Any]) -> ShardBatches:
        """Returns the batches of this rank, given the file indexes of all ranks."""
        options = self.options
        by_rank = self.found(held)
        mine = by_rank[options.rank if self.own else 0]
        locations = [
            (Location(number, inner, self.paths[number]), length)
            for number, found in mine.items()
            for inner, length in enumerate(found.lengths)
            if length
        ]
        lengths = [length for _, length in locations]
        if not self.own:
            options.need_samples(sum(lengths))
        share, plan = self._portion(lengths, by_rank)
        options.need_steps(plan.steps)
        plan = plan.limited(options.steps or plan.steps)
        first = next(found for files in by_rank for found in files.values())
        reader = self._files.reader([location for location, _ in locations], first)
        key = {"rank": (options.seed, options.rank), "global": (options.seed,)}.get(
            options.way or ""
        )
        return ShardBatches(reader, share, plan, key, self._files.mixed, self.epochs)

    def _portion(
        self, lengths: Sequence[int], by_rank: Sequence[dict[int, Found]]
    ) -> tuple[RankShard | GlobalShard, Spread]:
        """Returns the rows of this rank and the sizes of its batches."""
        options, batch_size = self.options, self.options.batch_size or 1
        rank, size = options.rank, options.size
        if options.shuffle == "global":
            plan = plan_samples(sum(lengths), size, rank, batch_size, options.remainder)
            return GlobalShard(full_shard(lengths), rank, size), Spread(
                plan.count, tuple(plan.sizes())
            )
        if self.own:
            counts = [sum(sum(found.lengths) for found in files.values()) for files in by_rank]
            share = full_shard(lengths)
        else:
            counts = row_counts(lengths, size)
            share = rank_shard(lengths, rank, size)
        return share, agreed_spread(counts, batch_size, options)
