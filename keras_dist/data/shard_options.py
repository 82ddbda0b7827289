"""The terms on which data is shared out: the arguments of `shard`, checked, and the place.

Knows which values each argument may have, not what a source does with them.
"""

import dataclasses
import operator
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, get_args

from keras_dist import errors, runtime
from keras_dist.data.order import Shuffle, Way
from keras_dist.data.partition import Remainder

__all__ = ["Fact", "ShardOptions"]

SAME_ARGUMENTS = "Pass the same arguments to shard() on every rank."


@dataclasses.dataclass(frozen=True)
class Fact:
    """Something on which all ranks must agree.

    Args:
        label: what it is, as in "the number of samples".
        value: this rank's value; it is compared and shown.
        remedy: what to do when the ranks differ, whole sentences.
    """

    label: str
    value: object
    remedy: str = SAME_ARGUMENTS


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """The arguments of `shard` with the rank they are for. Checked on creation.

    Args: those of `shard`; `shuffle` is `None` where the user left it open. `draws`: whether each
        rank draws from the whole at random, as for `sample`. A `global_batch_size` becomes the
        `batch_size` of each rank.

    Raises:
        ArgumentError: an argument has an impossible value.
        ArgumentTypeError: an argument is of the wrong kind.
    """

    batch_size: int | None = None
    shuffle: Shuffle | None = None
    seed: int = 0
    remainder: Remainder = "uneven"
    steps: int | None = None
    reader: Callable[[Sequence[str]], Any] | None = None
    shuffle_buffer: int | None = None
    global_batch_size: int | None = None
    batched: bool | None = None
    draws: bool = False
    rank: int = dataclasses.field(default_factory=runtime.rank)
    size: int = dataclasses.field(default_factory=runtime.size)
    where: str = dataclasses.field(default_factory=runtime.where)
    may_shrink: bool = dataclasses.field(default_factory=runtime.may_outlive_ranks)

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps", "shuffle_buffer", "global_batch_size"):
            self._set(name, self._count(name, least=1, optional=True))
        self._set("seed", self._count("seed", least=0, optional=False))
        if self.shuffle not in (None, "global") and not isinstance(self.shuffle, bool):
            raise self.wrong_kind("shuffle to be True, False or 'global'", self.shuffle)
        if self.batched is not None and not isinstance(self.batched, bool):
            raise self.wrong_kind("batched to be True or False", self.batched)
        if self.reader is not None and not callable(self.reader):
            raise self.wrong_kind(
                "reader to be a function from file names to a tf.data.Dataset", self.reader
            )
        if self.remainder not in get_args(Remainder):
            choices = ", ".join(map(repr, get_args(Remainder)))
            raise errors.ArgumentError(
                self.explain(
                    f"remainder to be one of {choices}",
                    repr(self.remainder),
                    "See shard() for what each does with samples that do not come out even.",
                )
            )
        if self.global_batch_size is not None:
            self._set("batch_size", self._share_of_batch(self.global_batch_size))

    def _share_of_batch(self, global_batch_size: int) -> int:
        share, left_over = divmod(global_batch_size, self.size)
        if self.batch_size not in (None, share):  # of terms that are replaced it is the share
            expected, remedy = "batch_size or global_batch_size", "Pass one of the two."
            received = f"batch_size={self.batch_size}, global_batch_size={global_batch_size}"
        elif left_over or not share:
            expected = f"global_batch_size to be a multiple of {self.size}, the number of ranks"
            received = str(global_batch_size)
            remedy = f"Pass for example {max(1, share) * self.size}."
        else:
            return share
        raise errors.ArgumentError(self.explain(expected, received, remedy))

    @property
    def way(self) -> Way | None:
        """In which way an epoch is ordered; none where it keeps the order of the data."""
        if self.draws:
            return "draw"
        if self.shuffle == "global":
            return "global"
        return None if self.shuffle is False else "rank"

    def facts(self) -> list[Fact]:
        """Returns the arguments on which all ranks must agree."""
        names = "batch_size global_batch_size batched shuffle seed remainder steps shuffle_buffer"
        facts = [Fact(name, getattr(self, name)) for name in names.split()]
        return [*facts, Fact("the use of a reader", self.reader is not None)]

    def lasting(self, facts: Sequence[Fact]) -> list[object]:
        """Returns the values of facts by which a later run knows the data again.

        Where the order knows no ranks, a later run may have others, and batches of another size.
        """
        is_one = self.way in (None, "global")
        sizes = ("batch_size", "global_batch_size", "steps") if is_one else ()
        return [fact.value for fact in facts if fact.label not in sizes]

    def explain(self, expected: str, received: str, remedy: str) -> str:
        """Returns the text of an error at this rank."""
        return errors.explain(self.where, expected, received, remedy)

    def wrong_kind(self, expected: str, received: object) -> errors.ArgumentTypeError:
        """Returns the error for an argument of the wrong kind."""
        text = f"{reprlib.repr(received)} of type {type(received).__name__}"
        return errors.ArgumentTypeError(
            self.explain(expected, text, "See the arguments of shard().")
        )

    def refuse(self, data: str, reasons: dict[str, str]) -> None:
        """Raises when an argument was given that means nothing for this kind of data.

        Args:
            data: the kind of data, a plural.
            reasons: by name of such an argument, what to do instead: whole sentences.
        """
        for name, remedy in reasons.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise errors.ArgumentError(
                    self.explain(f"no {name} for {data}", f"{name}={value!r}", remedy)
                )

    def refuse_global_order(self, data: str) -> None:
        """Raises when one order of the whole was asked for.

        Args:
            data: the kind of data that has none, a plural.
        """
        if self.shuffle == "global":
            raise errors.ArgumentError(
                self.explain(
                    f"shuffle to be True or False for {data}",
                    "shuffle='global'",
                    "Give shard() samples: there is one order of the whole.",
                )
            )

    def need_samples(self, total: int, of: str = "samples") -> None:
        """Raises when there is not at least one for every rank."""
        if total < self.size:
            raise errors.DataError(
                self.explain(
                    f"at least {self.size} {of}, one for each rank",
                    f"{total}",
                    "Use more data or start fewer ranks.",
                )
            )

    def need_steps(self, available: int) -> None:
        """Raises when an epoch has fewer steps than the user asked for."""
        if self.steps is not None and self.steps > available:
            raise errors.DataError(
                self.explain(
                    f"data for steps={self.steps} on each of {self.size} ranks",
                    f"enough for {available}",
                    "Lower steps or leave it out; use more data or a smaller batch.",
                )
            )

    def _count(self, name: str, least: int, optional: bool) -> int | None:
        value = getattr(self, name)
        if value is None and optional:
            return None
        try:
            count = operator.index(value)
        except TypeError:
            count = None
        if count is None or isinstance(value, bool):
            raise self.wrong_kind(f"{name} to be a whole number", value)
        if count < least:
            raise errors.ArgumentError(
                self.explain(
                    f"{name} to be at least {least}",
                    str(count),
                    f"Pass a larger {name}" + (" or leave it out." if optional else "."),
                )
            )
        return count

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
