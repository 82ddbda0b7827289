"""Do all ranks share out the same data on the same terms? Asked once, before the first step.

A rank whose data differs in length would have another number of steps, and the job would
hang at the end of an epoch; a rank whose data comes in another order would train on samples
of its neighbours. Knows nothing about any kind of data.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_dist import errors, ops, runtime
from keras_dist.data import epochs
from keras_dist.data.shard_options import Fact

__all__ = ["Source", "prepare"]


class Source(Protocol):
    """A data set that can be shared out."""

    @property
    def facts(self) -> list[Fact]:
        """What must be equal on all ranks."""

    @property
    def held(self) -> Any:
        """What may differ and all must know, such as how many elements this rank holds."""

    def part(self, held: Sequence[Any]) -> Any:
        """Returns this rank's part, given the `held` of all ranks."""


def prepare(survey: Callable[[], Source]) -> Any:
    """Surveys the data on every rank, makes sure that all agree, returns this rank's part.

    Collective: every rank; blocks. An error on one rank becomes an error on every rank.

    Args:
        survey: looks at this rank's arguments and data; may raise.

    Raises:
        MismatchError: the ranks have different data or terms.
        KerasDistError: what `survey` raised, here or on another rank.
    """
    source, failure = _attempt(survey)
    if runtime.size() == 1:
        reports = [_report(source, failure)]
    else:
        reports = ops.allgather_object(_report(source, failure), name="data.shard")
    if failure is not None:
        raise failure
    for _, _, report in reports:
        if report is not None:
            kind, text = report
            raise kind(text)
    _compare([facts for facts, _, _ in reports])
    if source is None:
        raise errors.DataError("No data was surveyed.")
    part = source.part([held for _, held, _ in reports])
    epochs.note(part, getattr(source, "epochs", None))
    # `fit` shuffles arrays only and says so of every other data, on every rank and in every
    # call; what comes from here has been shuffled as its caller wanted.
    warnings.filterwarnings("ignore", "`shuffle=True` was passed, but will be ignored")
    return part


_Report = tuple[list[Fact], Any, tuple[type[errors.KerasDistError], str] | None]


def _attempt(survey: Callable[[], Source]) -> tuple[Source | None, Exception | None]:
    try:
        return survey(), None
    except Exception as failure:  # the others are waiting: they must hear of it first
        return None, failure


def _report(source: Source | None, failure: Exception | None) -> _Report:
    if source is not None:
        return source.facts, source.held, None
    if isinstance(failure, errors.KerasDistError):
        return [], None, (type(failure), str(failure))
    text = errors.explain(
        runtime.where(),
        "data that can be read",
        f"{type(failure).__name__}: {failure}",
        "Mend it on that rank; its own traceback shows where.",
    )
    return [], None, (errors.DataError, text)


def _compare(facts: Sequence[Sequence[Fact]]) -> None:
    """Raises, with one text on all ranks, when some rank's facts are not those of rank 0."""
    for rank, others in enumerate(facts):
        for expected, received in zip(facts[0], others, strict=False):
            if expected != received:
                raise errors.MismatchError(
                    errors.explain(
                        f"[rank {rank} of {len(facts)}]",
                        f"{expected.label} to be {expected.value!r} as on rank 0",
                        repr(received.value),
                        expected.remedy,
                    )
                )
