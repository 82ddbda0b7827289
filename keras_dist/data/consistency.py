"""The check that all ranks pass the same data and options, of any kind, before the first step."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from keras_dist import errors, ops, runtime
from keras_dist.data import epochs
from keras_dist.data.epochs import Epochs
from keras_dist.data.shard_options import Fact


class Source(Protocol):
    """A data set that can be distributed over ranks."""

    @property
    def facts(self) -> list[Fact]:
        """The values that must be equal on all ranks."""

    @property
    def held(self) -> Any:
        """A value that may differ and that all ranks need, such as the number of elements."""

    def part(self, held: Sequence[Any]) -> Any:
        """Returns the shard of this rank from the `held` of all ranks."""


class Compared(NamedTuple):
    """A source of which this rank has made its part, which counts only if all ranks agree."""

    facts: list[Fact]
    made: Any
    held: Any = None
    epochs: Epochs | None = None

    def part(self, held: Sequence[Any]) -> Any:
        """Returns what this rank has made."""
        return self.made


def prepare(make_source: Callable[[], Source]) -> Any:
    """Compares the sources of all ranks, and returns the shard of this rank. Collective; blocks."""
    try:
        source = make_source()
    except Exception as failure:  # raised after the other ranks know of it
        _exchanged(([], None, _described(failure)))
        raise
    reports = _exchanged((source.facts, source.held, None))
    for _, _, failed in reports:
        if failed is not None:
            raise failed
    # A rank whose data differs in length would have another number of steps, and the job would wait
    # at the end of an epoch; one whose data has another order would train on those of others.
    _compare([facts for facts, _, _ in reports])
    part = source.part([held for _, held, _ in reports])
    epochs.register(part, getattr(source, "epochs", None))
    # `fit` shuffles arrays only and warns for all other data, on every rank and in every call; this
    # data has been shuffled as requested.
    warnings.filterwarnings("ignore", "`shuffle=True` was passed, but will be ignored")
    return part


_Report = tuple[list[Fact], Any, errors.KerasDistError | None]


def _exchanged(report: _Report) -> list[_Report]:
    if runtime.fit_size() == 1:
        return [report]
    return ops.allgather_object(report, name="data.shard", process_set=runtime.fit_set())


def _described(failure: Exception) -> errors.KerasDistError:
    if isinstance(failure, errors.KerasDistError):
        return failure
    received = f"{type(failure).__name__}: {failure}"
    remedy = "Fix the data on that rank; see its traceback."
    return errors.DataError("data that can be read", received, remedy)


def _compare(facts: Sequence[Sequence[Fact]]) -> None:
    """Checks that the facts of all ranks equal those of rank 0."""
    for rank, others in enumerate(facts):
        for expected, received in zip(facts[0], others, strict=False):
            if expected != received:
                raise errors.MismatchError(
                    f"[rank {rank} of {len(facts)}]",
                    f"{expected.label} to be {expected.value!r} as on rank 0",
                    repr(received.value),
                    expected.remedy,
                )
