"""Index of files of one kind: each rank inspects some files, and all ranks share the result."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.nested import mapped
from keras_dist.data.shard_options import Fact, ShardOptions

Unreadable = Literal["raise", "skip"]
NAMED = 5  # files that a message names


@dataclasses.dataclass(frozen=True)
class Found:
    """The contents of a file.

    Args:
        layout: name, dtype and row shape of each array; equal for all files.
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
    """Files, each inspected by one rank."""

    def __init__(
        self,
        look: Callable[[str], Found],
        paths: Sequence[str],
        options: ShardOptions,
        unreadable: Unreadable,
        facts: Sequence[Fact],
        own: bool = False,
        visible: bool = True,
    ):
        self.paths, self.options, self.own = paths, options, own
        _check_policy(unreadable, options)
        self._unreadable = unreadable
        self.facts = [*facts, Fact("unreadable", unreadable), *options.facts()]
        begin, stride = (0, 1) if own else (options.rank, options.size)
        found = [self._attempt(look, path) for path in paths[begin::stride]]
        opened = [self._attempt(_open, path) for path in paths] if visible else []
        missing = {n: reason for n, reason in enumerate(opened) if isinstance(reason, str)}
        self.held: Any = found, missing

    def found(self, held: Sequence[Any]) -> list[dict[int, Found]]:
        """Returns the contents of the readable files by file number, given `held` of all ranks.

        The list has one entry for all ranks; with `own`, one entry for each rank.
        """
        by_rank = self._merged(held)
        everything = [each for found in by_rank for each in found.values()]
        bad = [each for each in everything if isinstance(each, str)]
        if len(bad) == len(everything):
            reason, remedy = " ".join(bad[:1]) or "none", "Check the paths on every node."
            raise errors.DataError(self.options.where, "readable files", reason, remedy)
        _report_skipped(bad)
        good = [{n: f for n, f in found.items() if isinstance(f, Found)} for found in by_rank]
        self._compare([(n, f) for found in good for n, f in found.items()])
        return good

    def _merged(self, held: Sequence[Any]) -> list[dict[int, Found | str]]:
        if self.own:
            return [dict(enumerate(found)) for found, _ in held]
        merged: dict[int, Found | str] = {}
        for rank, (found, _) in enumerate(held):
            merged |= {number * len(held) + rank: each for number, each in enumerate(found)}
        for _, missing in held:
            merged |= missing
        return [dict(sorted(merged.items()))]

    def _compare(self, good: Sequence[tuple[int, Found]]) -> None:
        number, first = good[0]
        for other, each in good:
            if each.layout != first.layout:
                raise errors.DataError(
                    self.options.where,
                    f"rows of {self.paths[other]} to be {first.layout} as in {self.paths[number]}",
                    f"{each.layout}",
                    "Write all files with the same layout.",
                )

    def _attempt(self, look: Callable[[str], Any], path: str) -> Any:
        """Returns the result of `look`, or the text of the error."""
        try:
            return look(path)
        except Exception as failure:  # a damaged file may raise anything
            text = " ".join(str(failure).split()) or type(failure).__name__
            if not isinstance(failure, errors.DataError):
                text = self.options.explain(
                    f"{path} to be readable",
                    f"{type(failure).__name__}: {text}",
                    "Replace the file, or pass unreadable='skip'.",
                )
            if self._unreadable == "raise":
                raise errors.DataError(text) from failure
            return text


def _check_policy(unreadable: Unreadable, options: ShardOptions) -> None:
    if unreadable not in get_args(Unreadable):
        choices = " or ".join(map(repr, get_args(Unreadable)))
        remedy = "'raise' reports the file as an error, 'skip' skips it with a message."
        raise errors.ArgumentError(
            options.where, f"unreadable to be {choices}", repr(unreadable), remedy
        )


def _open(path: str) -> None:
    with open(path, "rb"):
        pass


def _report_skipped(reasons: Sequence[str]) -> None:
    if reasons:
        more = f" And {len(reasons) - NAMED} more." if len(reasons) > NAMED else ""
        runtime.notify(
            f"keras_dist skips {len(reasons)} files that cannot be read: "
            f"{' '.join(reasons[:NAMED])}{more}"
        )
