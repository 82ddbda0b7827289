"""Files that are shared out by pieces."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from keras_dist.data import pieces
from keras_dist.data.batches import for_keras
from keras_dist.data.epochs import Epochs
from keras_dist.data.files import agreed_spread
from keras_dist.data.piece_batches import PieceBatches, PieceReader
from keras_dist.data.survey import Found, Survey, Unreadable
from keras_dist.data.terms import Fact, Terms

__all__ = ["PieceFiles", "PieceSource", "Place"]


class Place(NamedTuple):
    """Where a piece lies.

    Args:
        file: the number of its file.
        inner: its number there.
        path: the path of its file.
    """

    file: int
    inner: int
    path: str


class PieceFiles(Protocol):
    """A kind of files."""

    mixed: int  # how many pieces are shuffled together

    def look(self, path: str) -> Found:
        """Looks into a file; raises whatever it may when the file is damaged."""

    def reader(self, places: Sequence[Place], found: Found) -> PieceReader:
        """Returns what reads the pieces."""


class PieceSource(Survey):
    """Files of one kind, shared out by pieces.

    Args:
        files: the kind.
        paths: see `Survey`; so are all that follow.
        terms: see `Survey`; with a batch size.
        unreadable: see `Survey`.
        facts: see `Survey`.
        own: see `Survey`.
        visible: see `Survey`.

    Raises:
        ArgumentError: one order of the whole was asked for.
        DataError: see `Survey`.
    """

    def __init__(
        self,
        files: PieceFiles,
        paths: Sequence[str],
        terms: Terms,
        unreadable: Unreadable,
        facts: Sequence[Fact],
        own: bool = False,
        visible: bool = True,
    ):
        terms.refuse_global_order("files, of which ranks have their own")
        super().__init__(files.look, paths, terms, unreadable, facts, own, visible)
        self._files = files
        text = repr([(fact.label, fact.value) for fact in self.facts])
        self.epochs = Epochs(hashlib.blake2b(text.encode(), digest_size=8).hexdigest())

    def part(self, held: Sequence[Any]) -> Any:
        """Returns this rank's batches as data for `fit`, given what all ranks have seen."""
        return for_keras(self.batches(held))

    def batches(self, held: Sequence[Any]) -> PieceBatches:
        """Returns this rank's batches, given what all ranks have seen."""
        terms = self.terms
        by_rank = self.found(held)
        mine = by_rank[terms.rank if self.own else 0]
        places = [
            (Place(number, inner, self.paths[number]), length)
            for number, found in mine.items()
            for inner, length in enumerate(found.lengths)
            if length
        ]
        lengths = [length for _, length in places]
        if self.own:
            counts = [sum(sum(found.lengths) for found in each.values()) for each in by_rank]
            share = pieces.whole(lengths)
        else:
            terms.need_samples(sum(lengths))
            counts = pieces.counts_of(lengths, terms.size)
            share = pieces.share_of(lengths, terms.rank, terms.size)
        plan = agreed_spread(counts, terms.batch_size or 1, terms)
        terms.need_steps(plan.steps)
        plan = plan.limited(terms.steps or plan.steps)
        first = next(found for each in by_rank for found in each.values())
        reader = self._files.reader([place for place, _ in places], first)
        key = None if terms.shuffle is False else (terms.seed, terms.rank)
        return PieceBatches(reader, share, plan, key, self._files.mixed, self.epochs)
