"""What holds for all data: ranks share it out, in equal steps, in an order that a later run has.

Each way in which data comes in is tested with the same properties, on 1 to 5 ranks, which are
threads. `pytest --hypothesis-profile=thorough` tries many more examples.
"""

import contextlib
import dataclasses
import itertools
import math

import numpy as np
import pytest
from data_checks import check_files, check_samples, check_union, is_too_short
from data_ranks import numbers_of, on_ranks, without_pipelines
from data_sources import BATCH, SOURCES, in_batches
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import keras_dist
from keras_dist import data, errors
from keras_dist.data import epochs

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="for one process")

LAYOUTS = [(40,), (11, 7, 13, 10), (6,) * 7, (3, 9, 1, 20, 8), (9, 0, 12, 16)]
SURE = math.log(1e12)  # of the number of orders, such that two differ


@dataclasses.dataclass(frozen=True)
class Case:
    """How a source is shared out.

    Args:
        name: of the source.
        lengths: numbers of samples of files; otherwise their sum counts.
        size: number of ranks.
        batch_size: of a rank.
        shuffle: as for `shard`; `None` is not to pass it.
        remainder: as for `shard`.
        seed: as for `shard`.
    """

    name: str
    lengths: tuple[int, ...]
    size: int
    batch_size: int
    shuffle: object
    remainder: str
    seed: int

    @property
    def source(self):
        return SOURCES[self.name]

    @property
    def is_shuffled(self):
        return self.source.is_shuffled(self.shuffle)

    @property
    def total(self):
        return sum(self.lengths)

    @property
    def pieces(self):
        return self.source.pieces(self.lengths) if self.source.pieces else None

    @property
    def rest(self):
        """How the remainder is shared out: see `Source`."""
        source = self.source
        if source.rest == "files" and (
            self.shuffle == "global" or (source.few_are_samples and len(self.pieces) < self.size)
        ):
            return "samples"
        return source.rest

    def parts(self, as_pipeline=False, **options):
        """Returns the data of each rank."""
        options |= {"seed": self.seed, "remainder": self.remainder}
        if self.shuffle is not None:
            options["shuffle"] = self.shuffle
        if self.source.has_batch_size:
            options["batch_size"] = self.batch_size
        with contextlib.nullcontext() if as_pipeline else without_pipelines():
            return on_ranks(self.size, lambda: self.source.make(self.lengths, **options))

    def epoch(self, parts):
        """Returns the numbers of an epoch, by rank and batch."""
        return list(map(self.read, parts))

    def read(self, batches):
        """Returns the numbers of batches, by batch."""
        return [numbers_of(batch, self.source.label) for batch in batches]

    @property
    def counts(self):
        """Number of samples of files of each rank."""
        return [len(self.held(rank)) for rank in range(self.size)]

    def held(self, rank):
        """Returns the numbers of a rank in the order of the data."""
        if len(self.pieces) >= self.size:
            return np.concatenate([[], *self.pieces[rank :: self.size]]).tolist()
        return np.concatenate(self.pieces)[rank :: self.size].tolist()


@st.composite
def cases(draw, name, ways, least):
    source = SOURCES[name]
    in_files = source.rest == "files" or source.pieces is None
    lengths = st.sampled_from(LAYOUTS) if in_files else st.tuples(st.integers(15, 45))
    return Case(
        name,
        draw(lengths),
        draw(st.integers(least, 5)),
        draw(st.integers(1, 9)) if source.has_batch_size else 1,
        draw(st.sampled_from(ways)),
        draw(st.sampled_from(["uneven", "pad", "drop"])),
        draw(st.integers(0, 3)),
    )


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def all_of(epoch):
    return flat(map(flat, epoch))


def by_step(epoch):
    """Returns the numbers of each step of all ranks."""
    return [flat(batches) for batches in zip(*epoch, strict=True)]


def sizes_of(epoch):
    return [list(map(len, batches)) for batches in epoch]


def for_each(name, ways=None, least=1):
    """Decorates a test of cases of a source, which are fewer for slow sources."""
    source = SOURCES[name]
    count = max(2, int(settings.default.max_examples * source.examples))
    several = cases(name, ways or source.ways, least)
    return lambda test: settings(max_examples=count)(given(several, st.data())(test))()


# --- How much each rank has


def check_share(case, epoch):
    """Checks that ranks have what the policy for the remainder promises, in equal steps."""
    assert len(set(map(len, epoch))) == 1
    check_union(all_of(epoch), case.total, case.remainder)
    if case.rest == "pooled":
        check_pooled(case, epoch)
    elif case.rest == "files":
        check_files(sizes_of(epoch), case.counts, case.batch_size, case.remainder)
    elif case.source.pieces is in_batches:
        epoch = [[whole_pieces(case, batch) for batch in batches] for batches in epoch]
        check_samples(sizes_of(epoch), len(case.pieces), 1, case.remainder)
    else:
        check_samples(sizes_of(epoch), case.total, case.batch_size, case.remainder)


def whole_pieces(case, numbers):
    """Returns the numbers of the batches of the source that make a batch."""
    found = list(dict.fromkeys(number // BATCH for number in numbers))
    assert numbers == np.concatenate([case.pieces[piece] for piece in found]).tolist()
    return found


def check_pooled(case, epoch):
    batches = [piece.tolist() for piece in case.pieces]
    rounds, leftover = divmod(len(batches), case.size)
    pooled = case.remainder == "uneven" and leftover > 0
    for rank, mine in enumerate(epoch):
        whole = rounds - pooled
        assert mine[:whole] == batches[: whole * case.size][rank :: case.size]
        assert len(mine) == rounds + (case.remainder == "pad" and leftover > 0)
    if pooled:
        assert len({len(mine[-1]) for mine in epoch}) <= 2
        assert flat(mine[-1] for mine in epoch) == flat(batches[(rounds - 1) * case.size :])
    elif len(epoch[0]) > rounds:
        assert all(mine[-1] in batches[rounds * case.size :] for mine in epoch)


# --- The order of an epoch


def check_orders(case, first, second):
    """Checks the orders of two epochs: that of the data, or others in each."""
    if not case.is_shuffled:
        assert first == second
        if case.rest == "pooled":
            return
        for rank, batches in enumerate(first):
            mine = flat(batches)
            count = len(mine)
            if case.pieces is None:
                assert mine == sorted(mine)
            elif case.source.pieces is not in_batches or len(case.pieces) >= case.size:
                expected = case.held(rank)
                assert mine[: len(expected)] == expected[:count]
                assert case.rest != "files" or mine == np.resize(expected, count).tolist()
    elif sum(math.lgamma(len(set(flat(batches)))) for batches in first) > SURE:
        assert first != second
        assert first != [sorted_like(batches) for batches in first]


def sorted_like(batches):
    """Returns the numbers of a rank in ascending order, in batches of the same sizes."""
    numbers = iter(sorted(flat(batches)))
    return [list(itertools.islice(numbers, len(batch))) for batch in batches]


# --- The properties


@pytest.mark.parametrize("name", SOURCES)
def test_ranks_share_out_each_epoch(name):
    @for_each(name)
    def check(case, draw):
        if case.rest == "files" and is_too_short(case.counts, case.batch_size, case.remainder):
            with pytest.raises(errors.DataError, match="elements by rank"):
                case.parts()
            return
        parts = case.parts(case.source.as_pipeline)
        first, second = case.epoch(parts), case.epoch(parts)
        assert [len(part) for part in parts] == list(map(len, first))
        check_share(case, first)
        check_share(case, second)
        check_orders(case, first, second)
        for part, batches in zip(parts, first, strict=True):
            if (order := epochs.of(part).samples) is not None:
                assert list(dict.fromkeys(order().tolist())) == list(dict.fromkeys(flat(batches)))
        # A later run has the same order.
        later = case.parts()
        to_epoch(later, parts, 1, draw)
        assert case.epoch(later) == second
        # So does one that ends its epochs early.
        expected = sizes_of(second)
        if case.source.is_stream:
            each = BATCH if case.rest == "pooled" else case.batch_size
            full = min(map(sum, expected)) // each - (case.rest == "pooled")
            expected = [[each] * full] * case.size
        elif case.name in ("text", "tfrecord"):  # with steps, their batches are full
            full = min(case.counts) // case.batch_size
            expected = [[case.batch_size] * full] * case.size
        if steps := draw.draw(st.integers(min(1, len(expected[0])), len(expected[0]))):
            early = case.parts(steps=steps)
            for part in early:
                data.set_epoch(part, 1)
            limited = case.epoch(early)
            assert sizes_of(limited) == [sizes[:steps] for sizes in expected]
            first_steps = [batches[:steps] for batches in second]
            if case.remainder != "pad" and sizes_of(first_steps) == sizes_of(limited):
                assert limited == first_steps


def to_epoch(later, earlier, number, draw):
    """Continues in an epoch, as a resumed fit or a resumed loop does."""
    kinds = {epochs.of(part).kind for part in (*later, *earlier)}
    assert len(kinds) == 1
    if draw.draw(st.booleans()):
        for part in later:
            data.set_epoch(part, number)
    else:
        epochs.restore({f"{kinds.copy().pop()} {n}": number for n in range(len(later))})


INDEPENDENT = {
    name: ways
    for name, source in SOURCES.items()
    if source.has_batch_size and (ways := list(filter(source.is_independent, source.ways)))
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_another_number_of_ranks_goes_on_in_the_same_order(name):
    @for_each(name, INDEPENDENT[name])
    def check(case, draw):
        size = draw.draw(st.integers(1, 5))
        both = math.lcm(case.size, size)
        assume(both <= case.total)
        both *= draw.draw(st.integers(1, max(1, case.total // (3 * both))))
        case = dataclasses.replace(case, batch_size=both // case.size)
        other = dataclasses.replace(case, size=size, batch_size=both // size)
        parts, later = case.parts(), other.parts()
        to_epoch(later, parts, 1, draw)
        case.epoch(parts)
        now, then = by_step(case.epoch(parts)), by_step(other.epoch(later))
        assert {epochs.of(part).global_batch for part in (*parts, *later)} == {both}
        # The last step may have the remainder, or lack it.
        full = max(0, min(len(now), len(then), case.total // both) - 1)
        assert list(map(len, now[:full])) == [both] * full
        assert list(map(sorted, now[:full])) == list(map(sorted, then[:full]))
        if case.remainder == "uneven":
            assert sorted(flat(now[full:])) == sorted(flat(then[full:]))


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.is_resharded])
def test_fewer_ranks_share_out_the_next_epoch(name):
    @for_each(name, least=2)
    def check(case, draw):
        parts = case.parts()
        case.epoch(parts)
        steps = len(parts[0])
        # Ranks die once or twice.
        deaths = st.sets(st.integers(1, case.size - 1), min_size=1, max_size=2)
        for fewer in sorted(draw.draw(deaths), reverse=True):
            parts = parts[:fewer]
            for rank, part in enumerate(parts):
                epochs.of(part).data().reshard(rank, fewer)
            following = case.epoch(parts)
            assert {len(batches) for batches in following} == {steps}
            assert all(batch for batches in following for batch in batches)
            check_union(all_of(following), case.total, case.remainder)


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if True in source.ways])
def test_each_seed_and_each_rank_has_an_order_of_its_own(name):
    case = Case(name, (24, 24), 2, 6, True, "uneven", 0)
    epoch = case.epoch(case.parts())
    assert epoch != case.epoch(dataclasses.replace(case, seed=1).parts())
    assert len({epochs.of(part).global_batch for part in case.parts()} | {None}) == 1
    if case.pieces is not None:
        places = [
            [case.held(rank).index(number) for number in flat(batches)]
            for rank, batches in enumerate(epoch)
        ]
        assert places[0] != places[1]
