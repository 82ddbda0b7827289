"""Do all ranks mean the same thing? Digests of calls, and who differs where. No MPI here.

Each rank describes the operation it is about to perform as a `CollectiveSignature`. The digests of
the signatures are compared before any data moves: a difference is found on every rank at once, so
every rank raises the same error and none is left waiting.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

__all__ = ["JOINED", "CollectiveSignature", "Entry", "JoinedRanks", "difference", "entries_of"]

JOINED = "join"  # the operation of a rank that has no more data


@dataclasses.dataclass(frozen=True)
class JoinedRanks:
    """Which ranks have no more data, while others still reduce.

    Args:
        first_out: the places of those that had joined when one was first missed.
        here: the places of those that took part in the last operation.
    """

    first_out: tuple[int, ...]
    here: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a call.

    Args:
        name: what the user knows it by; it is shown, not compared.
        shape: the part of its shape on which the ranks must agree.
        dtype: its dtype, as text.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


def entries_of(
    names: Sequence[str], specs: Sequence[tuple[Sequence[int], Any]]
) -> tuple[Entry, ...]:
    """Returns the entries of arrays of some names, shapes and dtypes."""
    return tuple(
        Entry(name, tuple(shape), str(dtype))
        for name, (shape, dtype) in zip(names, specs, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class CollectiveSignature:
    """What a rank is about to do.

    Args:
        operation: such as `"allreduce"`.
        entries: the arrays it acts on.
        op: the reduction, when there is one.
        root: the root rank, when there is one.
        key: a name under which the ranks must meet, when the user gave one.
        prescale: factor for the contributions.
        postscale: factor for the result.
        compression: what numbers look like between nodes.
        buckets: how the arrays are cut into buckets: for each, the positions of its arrays.
        bucket: which of them this is about.
        error: what is wrong with this rank's arguments: it comes to tell the others.
        first: whether it is the first of its kind, before which memory is made for it.
        holds: whether somebody on this rank still holds a result that is about to be written to;
            it is no difference.
        notice: what this rank tells the others on this occasion; it is no difference.
        refused: the names of operations that this rank has refused; they are no difference.
        spares: whether it has a meaning without the ranks that have joined; it is not compared.
        remedy: what to do when the ranks differ; shown, not compared.
    """

    operation: str
    entries: tuple[Entry, ...] = ()
    op: str | None = None
    root: int | None = None
    key: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    compression: str = "none"
    buckets: tuple[tuple[int, ...], ...] = ()
    bucket: int | None = None
    error: Exception | None = None
    first: bool = False
    holds: bool = False
    notice: str | None = None
    refused: tuple[str, ...] = ()
    spares: bool = False
    remedy: str = "Call the same operations in the same order on every rank."

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly when the ranks may go on together."""
        arrays = tuple((entry.shape, entry.dtype) for entry in self.entries)
        factors = (self.prescale, self.postscale)
        how = (self.op, self.root, self.key, factors, self.compression)
        cut = (self.buckets, self.bucket, self.first)
        asides = (self.holds, self.notice, self.refused)
        meaning = (self.operation, how, cut, arrays, str(self.error), asides)
        return hashlib.blake2b(repr(meaning).encode(), digest_size=16).digest()

    def __str__(self) -> str:
        names = ", ".join(repr(entry.name) for entry in self.entries[:3])
        more = f" and {len(self.entries) - 3} more" if len(self.entries) > 3 else ""
        return f"{self.operation}({names}{more})" if names else self.operation


# The arguments that are compared one by one, as the user knows them.
_LABELS = {
    "key": "name",
    "op": "op",
    "root": "root_rank",
    "prescale": "prescale_factor",
    "postscale": "postscale_factor",
    "compression": "compression",
}


def difference(
    calls: Sequence[CollectiveSignature], ranks: Sequence[int]
) -> tuple[int, str, str] | None:
    """Finds the first rank whose call differs from that of the first of them, and in what.

    Args:
        calls: the calls of all ranks that meet, in rank order.
        ranks: what these ranks are called in messages.

    Returns:
        The rank, what was expected of it and what it brought, both in words; `None` when
        all calls agree.
    """
    first, standard = calls[0], f"as on rank {ranks[0]}"
    for rank, call in zip(ranks, calls, strict=True):
        if call.digest != first.digest:
            return (rank, *_compare(first, call, standard))
    return None


def _compare(
    first: CollectiveSignature, other: CollectiveSignature, standard: str
) -> tuple[str, str]:
    if first.operation != other.operation:
        return f"{first} {standard}", str(other)
    for field, label in _LABELS.items():
        expected, received = getattr(first, field), getattr(other, field)
        if expected != received:
            return f"{label}={expected!r} in {first} {standard}", f"{label}={received!r}"
    for mine, theirs in zip(first.entries, other.entries, strict=False):
        if mine.shape != theirs.shape:
            return f"{mine.name!r} with shape {mine.shape} {standard}", _seen(theirs, mine)
        if mine.dtype != theirs.dtype:
            return f"{mine.name!r} with dtype {mine.dtype} {standard}", theirs.dtype
    if len(first.entries) != len(other.entries):
        return (
            f"{len(first.entries)} arrays in {first} {standard}",
            f"{len(other.entries)} arrays in {other}",
        )
    if first.buckets != other.buckets:
        return f"{first} in {_say_cut(first)} {standard}", _say_cut(other)
    if first.bucket != other.bucket:
        return f"bucket {first.bucket} of {first} {standard}", f"bucket {other.bucket}"
    words = {True: "for the first time", False: "not for the first time"}
    return f"{first} {words[first.first]} {standard}", words[other.first]


def _say_cut(call: CollectiveSignature) -> str:
    """Says how a call's arrays are cut into buckets, at most the first few."""
    some = ", ".join(str(list(bucket)) for bucket in call.buckets[:4])
    more = " ..." if len(call.buckets) > 4 else ""
    return f"{len(call.buckets)} buckets of gradients {some}{more}"


def _seen(entry: Entry, expected: Entry) -> str:
    return f"{entry.shape}" if entry.name == expected.name else f"{entry.name!r} {entry.shape}"
