"""The options of `shard`: its arguments, checked, and the rank."""

import dataclasses
import operator
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, get_args

from keras_dist import errors, runtime
from keras_dist.data.partition import (
    Plan,
    PlanFor,
    Remainder,
    Shuffle,
    Way,
    plan_after_change,
    plan_samples,
    plan_spread,
)

SAME_ARGUMENTS = "Pass the same arguments to shard() on every rank."


@dataclasses.dataclass(frozen=True)
class Fact:
    """A value that must be equal on all ranks."""

    label: str
    value: object
    remedy: str = SAME_ARGUMENTS


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """The arguments of `shard`, checked, and the rank they are for.

    `shuffle` is `None` if the user did not set it. `draws`: whether each rank draws samples at
    random, as for `sample`. A `global_batch_size` sets the `batch_size` of each rank.
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
    rank: int = dataclasses.field(default_factory=runtime.fit_rank)
    size: int = dataclasses.field(default_factory=runtime.fit_size)
    may_shrink: bool = dataclasses.field(default_factory=runtime.can_survive_rank_loss)

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps", "shuffle_buffer", "global_batch_size"):
            self._set(name, whole_number(name, getattr(self, name)))
        self._set("seed", whole_number("seed", self.seed, least=0, optional=False))
        if self.shuffle not in (None, "global") and not isinstance(self.shuffle, bool):
            raise wrong_kind("shuffle to be True, False or 'global'", self.shuffle)
        if self.batched is not None and not isinstance(self.batched, bool):
            raise wrong_kind("batched to be True or False", self.batched)
        if self.reader is not None and not callable(self.reader):
            raise wrong_kind(
                "reader to be a function from file names to a tf.data.Dataset", self.reader
            )
        remedy = "See shard() for what each does if samples do not divide evenly."
        check_choice("remainder", self.remainder, get_args(Remainder), remedy)
        if self.global_batch_size is not None:
            self._set("batch_size", self._portion_of_batch(self.global_batch_size))

    def _portion_of_batch(self, global_batch_size: int) -> int:
        share, left_over = divmod(global_batch_size, self.size)
        if self.batch_size not in (None, share):  # of replaced options it is the share
            expected, remedy = "batch_size or global_batch_size", "Pass one of the two."
            received = f"batch_size={self.batch_size}, global_batch_size={global_batch_size}"
        elif left_over or not share:
            expected = f"global_batch_size to be a multiple of {self.size}, the number of ranks"
            received = str(global_batch_size)
            remedy = f"Pass for example {max(1, share) * self.size}."
        else:
            return share
        raise errors.ArgumentError(expected, received, remedy)

    @property
    def way(self) -> Way | None:
        """How an epoch is ordered; `None`: in the order of the data."""
        if self.draws:
            return "draw"
        if self.shuffle == "global":
            return "global"
        return None if self.shuffle is False else "rank"

    def plan(self, total: int, batch_size: int) -> Plan:
        """Returns the plan of this rank for samples, see `plan_samples`."""
        return plan_samples(total, self.size, self.rank, batch_size, self.remainder)

    def epoch_plan(self, total: int, batch_size: int, of: str = "samples") -> Plan:
        """Returns the plan of this rank, limited to `steps`; raises if there is too little data."""
        if self.draws:
            if total == 0:
                self.need_samples(total, of)
            steps = self.steps or -(-total // (self.size * batch_size))
            return Plan(self.rank, self.size, total, steps * batch_size, steps, batch_size)
        self.need_samples(total, of)
        plan = self.plan(total, batch_size)
        self.need_steps(plan.steps)
        return plan.limited(self.steps or plan.steps)

    def plans_after_loss(self, total: int, batch_size: int, steps: int) -> PlanFor | None:
        """Returns what plans again after ranks have died; `None` if none may."""
        if not self.may_shrink or self.draws:
            return None

        def plan_for(rank: int, size: int) -> Plan:
            before = dataclasses.replace(self, rank=rank if size == self.size else 0)
            first = before.plan(total, batch_size).limited(steps)
            if size == self.size:
                return first
            return plan_after_change(first, total, size, rank, self.remainder)

        return plan_for

    def spread(self, counts: Sequence[int], batch_size: int) -> Plan:
        """Returns the plan of this rank for files, from the number of elements of each rank."""
        plan = plan_spread(counts, self.rank, batch_size, self.remainder)
        if plan is None:
            raise errors.DataError(
                f"files with elements for {-(-max(counts) // batch_size)} steps on each rank, as "
                f"on the rank with the most elements",
                f"{counts} elements by rank",
                "Use files of similar length, their number a multiple of the number of ranks, "
                "or a larger batch_size, or remainder='pad'.",
            )
        return plan

    def facts(self) -> list[Fact]:
        """Returns the arguments on which all ranks must agree."""
        names = "batch_size global_batch_size batched shuffle seed remainder steps shuffle_buffer"
        facts = [Fact(name, getattr(self, name)) for name in names.split()]
        return [*facts, Fact("the use of a reader", self.reader is not None)]

    def lasting(self, facts: Sequence[Fact]) -> list[object]:
        """Returns the values of facts by which a later run recognises the data."""
        # A later run may have other ranks and batch sizes if the order does not depend on them.
        independent = self.way in (None, "global")
        sizes = ("batch_size", "global_batch_size", "steps") if independent else ()
        return [fact.value for fact in facts if fact.label not in sizes]

    def refuse(self, data: str, reasons: dict[str, str]) -> None:
        """Refuses arguments that are not defined for a kind of data."""
        for name, remedy in reasons.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise errors.ArgumentError(f"no {name} for {data}", f"{name}={value!r}", remedy)

    def need_samples(self, total: int, of: str = "samples") -> None:
        """Checks that there is at least one sample for every rank."""
        if total < self.size:
            raise errors.DataError(
                f"at least {self.size} {of}, one for each rank",
                f"{total}",
                "Use more data or start fewer ranks.",
            )

    def need_steps(self, available: int) -> None:
        """Checks that an epoch has the steps that the user passed."""
        if self.steps is not None and self.steps > available:
            raise errors.DataError(
                f"data for steps={self.steps} on each of {self.size} ranks",
                f"enough for {available}",
                "Lower steps or leave it out; use more data or a smaller batch.",
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


# --- Checks of arguments


def wrong_kind(expected: str, received: object) -> errors.ArgumentTypeError:
    """Returns the error of an argument of a wrong type."""
    text = f"{reprlib.repr(received)} of type {type(received).__name__}"
    return errors.ArgumentTypeError(expected, text, "See the arguments of shard().")


def check_choice(name: str, value: object, choices: Sequence[object], remedy: str) -> None:
    """Checks that an argument has one of a few values."""
    if value not in choices:
        expected = f"{name} to be one of {', '.join(map(repr, choices))}"
        raise errors.ArgumentError(expected, repr(value), remedy)


def whole_number(name: str, value: Any, least: int = 1, optional: bool = True) -> int | None:
    """Returns an argument that is a whole number, as an `int`; raises if it is none."""
    if value is None and optional:
        return None
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise wrong_kind(f"{name} to be an integer", value)
    if count < least:
        remedy = f"Pass a larger {name}" + (" or leave it out." if optional else ".")
        raise errors.ArgumentError(f"{name} to be at least {least}", str(count), remedy)
    return count
