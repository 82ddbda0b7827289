"""An index of files: each is inspected by one rank, and all ranks get the result."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.nested import mapped
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = ["FileIndex", "Found", "Unreadable"]

Unreadable = Literal["raise", "skip"]
NAMED = 5  # files in a message


@dataclasses.dataclass(frozen=True)
class Found:
    """Contents of a file.

    Args:
        lengths: number of rows of each piece.
        layout: name, dtype and shape of a row of each array; the same in all files.
        names: the names in the structure of a batch.
    """

    lengths: tuple[int, ...]
    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    names: Any

    @property
    def example(self) -> Any:
        """Empty arrays in the structure of a batch."""
        arrays = {name: np.empty((0, *shape), dtype) for name, dtype, shape in self.layout}
        return mapped(lambda name: arrays[name], self.names)


class FileIndex:
    """An index of files, each inspected by one rank.

    Args:
        look: inspects a file; may raise any error if the file is damaged.
        paths: paths of all files, or of those of this rank.
        terms: options of the data set.
        unreadable: what to do with files that a rank cannot read.
        facts: further values that must be equal on all ranks.
        own: whether each rank has files of its own. Defaults to `False`.
        visible: whether every rank checks that it can open all files, also those that it does not
            inspect. Defaults to `True`.

    Raises:
        DataError: a file cannot be read, and is not skipped.
    """

    def __init__(
        self,
        look: Callable[[str], Found],
        paths: Sequence[str],
        terms: ShardOptions,
        unreadable: Unreadable,
        facts: Sequence[Fact],
        own: bool = False,
        visible: bool = True,
    ):
        self.paths, self.terms, self.own = paths, terms, own
        self._unreadable = _checked(unreadable, terms)
        self.facts = [*facts, Fact("unreadable", unreadable), *terms.facts()]
        begin, stride = (0, 1) if own else (terms.rank, terms.size)
        looks = [self._attempt(look, path) for path in paths[begin::stride]]
        reaches = [self._attempt(_reach, path) for path in paths] if visible else []
        missed = {n: reason for n, reason in enumerate(reaches) if isinstance(reason, str)}
        self.held: Any = looks, missed

    def found(self, held: Sequence[Any]) -> list[dict[int, Found]]:
        """Returns the contents of the readable files, by number.

        Args:
            held: results of all ranks.

        Returns:
            One dict, or one for each rank if they have files of their own.

        Raises:
            DataError: no file is readable, or their layouts differ.
        """
        by_rank = self._merged(held)
        every = [each for found in by_rank for each in found.values()]
        bad = [each for each in every if isinstance(each, str)]
        if len(bad) == len(every):
            remedy = "Check the paths on every node."
            received = " ".join(bad[:1]) or "none"
            raise errors.DataError(self.terms.explain("files that can be read", received, remedy))
        _log_skipped(bad)
        good = [{n: f for n, f in found.items() if isinstance(f, Found)} for found in by_rank]
        self._compare([(n, f) for found in good for n, f in found.items()])
        return good

    def _merged(self, held: Sequence[Any]) -> list[dict[int, Found | str]]:
        if self.own:
            return [dict(enumerate(looks)) for looks, _ in held]
        found: dict[int, Found | str] = {}
        for rank, (looks, _) in enumerate(held):
            found |= {number * len(held) + rank: each for number, each in enumerate(looks)}
        for _, missed in held:
            found |= missed
        return [dict(sorted(found.items()))]

    def _compare(self, good: Sequence[tuple[int, Found]]) -> None:
        number, first = good[0]
        for other, each in good:
            if each.layout != first.layout:
                raise errors.DataError(
                    self.terms.explain(
                        f"rows of {self.paths[other]} to be {first.layout} as in "
                        f"{self.paths[number]}",
                        f"{each.layout}",
                        "Write all files with the same arrays.",
                    )
                )

    def _attempt(self, look: Callable[[str], Any], path: str) -> Any:
        """Returns the result of `look`, or the reason of its failure."""
        try:
            return look(path)
        except Exception as failure:  # libraries raise anything for damaged files
            reason = " ".join(str(failure).split()) or type(failure).__name__
            if not isinstance(failure, errors.DataError):
                reason = self.terms.explain(
                    f"{path} to be readable",
                    f"{type(failure).__name__}: {reason}",
                    "Copy the file again, or pass unreadable='skip'.",
                )
            if self._unreadable == "raise":
                raise errors.DataError(reason) from failure
            return reason


def _checked(unreadable: Unreadable, terms: ShardOptions) -> Unreadable:
    """Returns the policy for files that cannot be read.

    Raises:
        ArgumentError: the policy is unknown.
    """
    if unreadable not in get_args(Unreadable):
        choices = " or ".join(map(repr, get_args(Unreadable)))
        remedy = "'raise' raises an error, 'skip' skips the file and logs it."
        raise errors.ArgumentError(
            terms.explain(f"unreadable to be {choices}", repr(unreadable), remedy)
        )
    return unreadable


def _reach(path: str) -> None:
    with open(path, "rb"):
        pass


def _log_skipped(reasons: Sequence[str]) -> None:
    if reasons:
        more = f" And {len(reasons) - NAMED} more." if len(reasons) > NAMED else ""
        runtime.notify(
            f"keras_dist skips {len(reasons)} files that cannot be read: "
            f"{' '.join(reasons[:NAMED])}{more}"
        )
