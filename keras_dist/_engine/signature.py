"""Signatures of collectives: their digests, and where two differ. See decision 3."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.compression import Compression, Compressor
from keras_dist._engine.gradient_sets import GradientSet

JOINED = "join"  # the operation of a rank that has no more data


@dataclasses.dataclass(frozen=True)
class JoinedRanks:
    """The ranks that are out of data and have joined, while others still reduce."""

    first_out: tuple[int, ...]
    here: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of an operation."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def entries_of(
    names: Sequence[str], specs: Sequence[tuple[Sequence[int], Any]]
) -> tuple[Entry, ...]:
    """Returns the entries of arrays of some names, shapes and dtypes."""
    return tuple(
        Entry(name, tuple(shape), _text_of(dtype))
        for name, (shape, dtype) in zip(names, specs, strict=True)
    )


def _text_of(dtype: Any) -> str:
    """Returns a dtype as text; that of another byte order in words."""
    orders = {"<": "little", ">": "big"}  # a native one is "="
    if not isinstance(dtype, np.dtype) or dtype.byteorder not in orders:
        return str(dtype)
    return f"{dtype.newbyteorder('=')} in {orders[dtype.byteorder]}-endian byte order"


def entries_of_arrays(names: Sequence[str], arrays: Sequence[Any]) -> tuple[Entry, ...]:
    """Returns the entries of arrays."""
    return entries_of(names, [(array.shape, array.dtype) for array in arrays])


@dataclasses.dataclass(frozen=True)
class CollectiveSignature:
    """What a rank is about to do."""

    operation: str
    entries: tuple[Entry, ...] = ()
    op: str | None = None
    root: int | None = None
    key: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    compression: str = "none"
    library: str = ""
    buckets: tuple[tuple[int, ...], ...] = ()
    bucket: int | None = None
    piece: int | None = None
    launched: int = 0
    ahead: bool = False
    error: Exception | None = None
    first: bool = False
    notice: str | None = None
    refused: tuple[str, ...] = ()
    gradients: GradientSet | None = None
    spares: bool = False
    takes_named: bool = True
    remedy: str = "Call the same operations in the same order on every rank."

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes, equal exactly where the ranks may continue without an exchange."""
        arrays = tuple((entry.shape, entry.dtype) for entry in self.entries)
        factors = (self.prescale, self.postscale)
        options = (self.op, self.root, self.key, factors, self.compression, self.library)
        plan = (self.buckets, self.bucket, self.piece, self.launched, self.first)
        gradients = None if self.gradients is None else self.gradients.digest
        riders = (self.notice, self.refused)
        compared = (self.operation, options, plan, arrays, str(self.error), riders, gradients)
        return hashlib.blake2b(repr(compared).encode(), digest_size=16).digest()

    @functools.cached_property
    def launched_ahead(self) -> "CollectiveSignature":
        """The same operation of a rank that has launched it, and nothing else, before it meets."""
        return dataclasses.replace(self, launched=1, ahead=True)

    def __str__(self) -> str:
        names = ", ".join(repr(entry.name) for entry in self.entries[:3])
        more = f" and {len(self.entries) - 3} more" if len(self.entries) > 3 else ""
        return f"{self.operation}({names}{more})" if names else self.operation


# Fields that are compared one by one, and their names for the user.
_LABELS = {
    "key": "name",
    "op": "op",
    "root": "root_rank",
    "prescale": "prescale_factor",
    "postscale": "postscale_factor",
    "compression": "compression",
    "library": "library of GPU arrays",
}


def difference(
    calls: Sequence[CollectiveSignature], ranks: Sequence[int]
) -> tuple[int, str, str] | None:
    """Finds the first rank whose operation differs, with the expected and the received text."""
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
            other_name = "" if theirs.name == mine.name else f"{theirs.name!r} "
            expected = f"{mine.name!r} with shape {mine.shape} {standard}"
            return expected, f"{other_name}{theirs.shape}"
        if mine.dtype != theirs.dtype:
            return f"{mine.name!r} with dtype {mine.dtype} {standard}", theirs.dtype
    if len(first.entries) != len(other.entries):
        return (
            f"{len(first.entries)} arrays in {first} {standard}",
            f"{len(other.entries)} arrays in {other}",
        )
    if first.buckets != other.buckets:
        return f"{first} in {_describe_buckets(first)} {standard}", _describe_buckets(other)
    if first.bucket != other.bucket:
        return f"bucket {first.bucket} of {first} {standard}", f"bucket {other.bucket}"
    if first.piece != other.piece:
        return f"piece {first.piece} of {first} {standard}", f"piece {other.piece}"
    if first.launched != other.launched:
        return f"{first} after {first.launched} launches {standard}", f"{other.launched} launches"
    words = {True: "for the first time", False: "not for the first time"}
    return f"{first} {words[first.first]} {standard}", words[other.first]


def _describe_buckets(call: CollectiveSignature) -> str:
    some = ", ".join(str(list(bucket)) for bucket in call.buckets[:4])
    more = " ..." if len(call.buckets) > 4 else ""
    return f"{len(call.buckets)} buckets of gradients {some}{more}"


@dataclasses.dataclass(frozen=True)
class OpOptions:
    """What a reduction computes. The ranks compare the options before data moves."""

    op: ReduceOp = ReduceOp.AVERAGE
    key: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Compressor = Compression.none
    gradients: GradientSet | None = None

    def signature(self, operation: str, **fields: Any) -> CollectiveSignature:
        return CollectiveSignature(
            operation,
            op=self.op.value,
            key=self.key,
            prescale=self.prescale,
            postscale=self.postscale,
            compression=self.compression.name,
            gradients=self.gradients,
            **fields,
        )


@dataclasses.dataclass(frozen=True)
class BucketOptions:
    """How a `FusedAllreduce` runs."""

    bucket_nbytes: int
    first_nbytes: int | None = None
    groups: Sequence[Sequence[int]] = ()
    tables: Sequence[int] = ()  # arrays of which few rows may differ from zero, each in no group
    finds_rows: bool = True  # of tables that are given whole
    operation: str = "allreduce"
    remedy: str = CollectiveSignature.remedy
    lend: bool = False
    overlaps: bool = False
    counts_updates: bool = False
    divides: bool = False
    ranks: Callable[[], Any] | None = None
    pooled: bool = False
