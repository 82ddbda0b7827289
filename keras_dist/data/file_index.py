"""Files of one kind, looked into by one rank each: what all ranks then know of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.nested import mapped
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = ["FileIndex", "Found", "Unreadable"]

Unreadable = Literal["raise", "skip"]
NAMED = 5  # as many files a message names


@dataclasses.dataclass(frozen=True)
class Found:
    """What stands in a file.

    Args:
        lengths: rows of each piece.
        layout: name, dtype and shape of a row of each array; the same in all files.
        names: these names in the structure of a batch.
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
    """Files, each looked into by one rank.

    Args:
        look: looks into a file; raises whatever it may when the file is damaged.
        paths: all of them; or those of this rank, where each has its own.
        terms: the terms on which to share them out.
        unreadable: what becomes of files that some rank cannot read.
        facts: what else must be equal on all ranks.
        own: whether each rank has files of its own. Defaults to False.
        visible: whether every rank makes sure that it can reach all files, not only those that it
            looks into. Defaults to True.

    Raises:
        DataError: a file cannot be read, and is not to be skipped.
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
        missed = {n: said for n, said in enumerate(reaches) if isinstance(said, str)}
        self.held: Any = looks, missed

    def found(self, held: Sequence[Any]) -> list[dict[int, Found]]:
        """Returns by number the files that can be read, given what all ranks have seen.

        Once for all ranks, or where they have files of their own for each.

        Raises:
            DataError: there are none, or they are not alike.
        """
        by_rank = self._merged(held)
        every = [each for found in by_rank for each in found.values()]
        bad = [each for each in every if isinstance(each, str)]
        if len(bad) == len(every):
            remedy = "Look at the paths, on every node."
            said = " ".join(bad[:1]) or "none"
            raise errors.DataError(self.terms.explain("files that can be read", said, remedy))
        _say_skipped(bad)
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
                        "Write all files alike.",
                    )
                )

    def _attempt(self, look: Callable[[str], Any], path: str) -> Any:
        """Returns what a look at a file gives, or what is wrong with it."""
        try:
            return look(path)
        except Exception as failure:  # whatever a damaged file makes a library do
            said = " ".join(str(failure).split()) or type(failure).__name__
            if not isinstance(failure, errors.DataError):
                said = self.terms.explain(
                    f"{path} to be readable",
                    f"{type(failure).__name__}: {said}",
                    "Bring it there again, or pass unreadable='skip'.",
                )
            if self._unreadable == "raise":
                raise errors.DataError(said) from failure
            return said


def _checked(unreadable: Unreadable, terms: ShardOptions) -> Unreadable:
    """Returns the policy for files that cannot be read.

    Raises:
        ArgumentError: there is no such policy.
    """
    if unreadable not in get_args(Unreadable):
        choices = " or ".join(map(repr, get_args(Unreadable)))
        remedy = "'raise' names the file, 'skip' leaves it out and says so."
        raise errors.ArgumentError(
            terms.explain(f"unreadable to be {choices}", repr(unreadable), remedy)
        )
    return unreadable


def _reach(path: str) -> None:
    with open(path, "rb"):
        pass


def _say_skipped(said: Sequence[str]) -> None:
    if said:
        more = f" And {len(said) - NAMED} more." if len(said) > NAMED else ""
        runtime.notify(
            f"keras_dist leaves out {len(said)} files that cannot be read: "
            f"{' '.join(said[:NAMED])}{more}"
        )
