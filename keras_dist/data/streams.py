"""Sharding of iterables such as generators: every rank reads all, and keeps every n-th element."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_dist import errors
from keras_dist.data.epochs import Epochs, kind_of
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.round_robin import plan_round_robin
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.stream_batches import StreamBatches

SAME = "Pass shard() a function that makes the same generator on every rank."


class StreamSource:
    """An iterator, or a function that makes one for each epoch."""

    held = None

    def __init__(self, data: Any, options: ShardOptions):
        remedy = "A generator keeps its order; shuffle in the generator."
        own = {"shuffle": remedy, "shuffle_buffer": remedy, "reader": "Only files have a reader."}
        own["draws"] = "Draws need random access to samples; draw in the generator."
        options.refuse("a generator", own)
        self._options = options
        self._batch_size = _batch_size(options)
        self._reads_once = isinstance(data, Iterator)
        self._open: Callable[[], Any] = data if callable(data) else lambda: data
        total = None
        if options.steps is None:
            self._require_repeatable()
            total = sum(1 for _ in self._iterate())
            options.need_samples(total, "samples" if self._batch_size else "batches")
        self._steps = options.steps or self._steps_of(total or 0)
        self.facts = [
            Fact("the kind of data", "a generator", SAME),
            Fact("the number of its elements", total, SAME),
            *options.facts(),
        ]
        in_order = dataclasses.replace(options, shuffle=False)
        self.epochs = Epochs(kind_of(in_order.lasting(self.facts)))
        self.epochs.global_batch = options.size * (self._batch_size or 1)

    def _require_repeatable(self) -> None:
        if self._reads_once:
            raise errors.DataError(
                self._options.where,
                "steps, or a function that makes a generator for each epoch",
                "an iterator, which can be read only once",
                "Pass steps, the number of batches in an epoch on each rank, or the function "
                "itself, without calling it.",
            )

    def _steps_of(self, total: int) -> int:
        options, batch_size = self._options, self._batch_size
        if batch_size is None:
            return plan_round_robin(total, options.size, options.remainder).steps
        return options.plan(total, batch_size).steps

    def _iterate(self) -> Iterator[Any]:
        iterable = self._open()
        if not hasattr(iterable, "__iter__"):
            raise self._options.wrong_kind("the function to return a generator", iterable)
        return iter(iterable)

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns the batches of this rank as a `keras.utils.PyDataset`."""
        from keras_dist.data.stream_dataset import StreamDataset

        batches = StreamBatches(self._options, self._batch_size, self._steps)
        return StreamDataset(batches, self._iterate, self._reads_once, self.epochs)


def _batch_size(options: ShardOptions) -> int | None:
    if options.batched:
        remedy = "Batches of a generator are not split; leave out one of the two arguments."
        options.refuse(
            "batches of a generator", {"batch_size": remedy, "global_batch_size": remedy}
        )
        return None
    if options.batched is False:
        return options.batch_size or DEFAULT_BATCH_SIZE
    return options.batch_size
