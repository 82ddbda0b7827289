"""Which gradients a rank brings to a reduction. Independent of MPI.

A gradient, known by its variable, that is missing on some ranks counts as zero there: ranks that
differ learn what the others have, and reduce what any rank has.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

COMPARISON = "the comparison of gradients"  # of a rank that does not know what to reduce
# Dtype of a gradient, and that of the indices if it consists of rows.
Form = tuple[str, str | None]
LISTED = 8  # names in a message
COMPILED = (
    "A compiled step cannot change: give every rank the gradients of the same variables, as by "
    "unconnected_gradients=tf.UnconnectedGradients.ZERO, or run the step eagerly, where a missing "
    "gradient counts as zero."
)


@dataclasses.dataclass(frozen=True)
class GradientSet:
    """The gradients of a rank."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    forms: tuple[Form | None, ...]
    adapts: bool

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes, equal where the ranks may continue without an exchange."""
        return hashlib.blake2b(repr((self.keys, self.forms)).encode(), digest_size=16).digest()


class UnlikeGradients(Exception):
    """The ranks bring different gradients, and this rank must compare them with the others."""

    def __init__(self, forms: Sequence[Form | None]):
        super().__init__(forms)
        self.forms = tuple(forms)


def union(sets: Sequence[GradientSet]) -> tuple[Form | None, ...]:
    """Returns the form of each gradient that any rank has: dense, if it is dense on one of them."""
    return tuple(
        next((form for form in forms if form and form[1] is None), None)
        or next(filter(None, forms), None)
        for forms in zip(*(each.forms for each in sets), strict=True)
    )


def difference_of_sets(
    sets: Sequence[GradientSet], ranks: Sequence[int]
) -> tuple[int, str, str, str | None] | None:
    """Finds a rank that others cannot go on with: expected, received, and a special remedy."""
    first, standard = sets[0], f"as on rank {ranks[0]}"
    for rank, other in zip(ranks, sets, strict=True):
        if other.keys != first.keys:
            expected, received = _listed(first, other), _listed(other, first)
            return rank, f"gradients of {expected} {standard}", received, None
    forms = union(sets)
    for rank, other in zip(ranks, sets, strict=True):
        for name, mine, form in zip(other.names, other.forms, forms, strict=True):
            if mine == form:
                continue
            is_other_dtype = mine and form and (mine[0] != form[0] or (mine[1] and form[1]))
            if is_other_dtype or not other.adapts:
                expected = f"the gradient of {name!r} as on other ranks, {_described(form)}"
                return rank, expected, _described(mine), None if is_other_dtype else COMPILED
    return None


def _described(form: Form | None) -> str:
    if form is None:
        return "none"
    return form[0] if form[1] is None else f"rows of {form[0]} with indices of {form[1]}"


def _listed(mine: GradientSet, other: GradientSet) -> str:
    """Returns the names of variables; of many those alone that the other rank lacks."""
    pairs = list(zip(mine.names, mine.keys, strict=True))
    if len(pairs) > LISTED:
        pairs = [pair for pair in pairs if pair[1] not in other.keys] or [
            pair for pair, key in zip(pairs, other.keys, strict=False) if pair[1] != key
        ]
    some = ", ".join(repr(name) for name, _ in pairs[:LISTED])
    more = " ..." if len(pairs) > LISTED else ""
    return f"{len(mine.names)} variables{', ' if some else ''}{some}{more}"
