"""Data that can only be read one element after another: every n-th element is this rank's.

Each rank reads all of it. Generators, and whatever else gives an iterator.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_dist import errors
from keras_dist.data.epochs import Epochs
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.partition import plan_deal
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.stream_batches import StreamBatches

__all__ = ["StreamSource"]

AGAIN = "Give shard() a function that makes the same generator on every rank."


class StreamSource:
    """An iterator, or a function that makes one for each epoch.

    Args:
        data: a function without arguments that returns an iterator, the same every time and on
            all ranks; something that can be iterated over again; or an iterator, which is read
            once, epoch after epoch.
        options: options of `shard`. With a batch size elements are samples, else batches.

    Raises:
        DataError: it has no elements, or there is no telling how many.
    """

    held = None

    def __init__(self, data: Any, options: ShardOptions):
        remedy = "What is read one after another keeps its order; shuffle it in the generator."
        own = {"shuffle": remedy, "shuffle_buffer": remedy, "reader": "Only files have one."}
        own["draws"] = "To draw at random needs samples by number; draw in the generator."
        options.refuse("a generator", own)
        self._options = options
        self._batch_size = _batch_size(options)
        self._is_one = isinstance(data, Iterator)
        self._open: Callable[[], Any] = data if callable(data) else lambda: data
        total = None
        if options.steps is None:
            self._need_a_function()
            total = sum(1 for _ in self._opened())
            options.need_samples(total, "samples" if self._batch_size else "batches")
        self._steps = options.steps or self._steps_of(total or 0)
        self.facts = [
            Fact("the kind of data", "a generator", AGAIN),
            Fact("the number of its elements", total, AGAIN),
            *options.facts(),
        ]
        self.epochs = Epochs(repr([(fact.label, fact.value) for fact in self.facts]))
        self.epochs.global_batch = options.size * (self._batch_size or 1)

    def _need_a_function(self) -> None:
        if self._is_one:
            raise errors.DataError(
                self._options.explain(
                    "steps, or a function that makes a generator anew for each epoch",
                    "an iterator that can be read once",
                    "Pass steps, the number of batches in an epoch on each rank, or the function "
                    "itself, without calling it.",
                )
            )

    def _steps_of(self, total: int) -> int:
        options, batch_size = self._options, self._batch_size
        if batch_size is None:
            return plan_deal(total, options.size, options.remainder).steps
        return options.plan(total, batch_size).steps

    def _opened(self) -> Iterator[Any]:
        made = self._open()
        if not hasattr(made, "__iter__"):
            raise self._options.wrong_kind("the function to return a generator", made)
        return iter(made)

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns this rank's batches as a `keras.utils.PyDataset`."""
        from keras_dist.data.stream_dataset import StreamDataset

        batches = StreamBatches(self._options, self._batch_size, self._steps)
        return StreamDataset(batches, self._opened, self._is_one, self.epochs)


def _batch_size(options: ShardOptions) -> int | None:
    if options.batched:
        remedy = "Batches of a generator stay as they are: leave out one of the two."
        options.refuse(
            "batches of a generator", {"batch_size": remedy, "global_batch_size": remedy}
        )
        return None
    if options.batched is False:
        return options.batch_size or DEFAULT_BATCH_SIZE
    return options.batch_size
