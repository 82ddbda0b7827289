"""What `shard` promises of the numbers of samples that ranks have, for each policy."""

__all__ = ["check_files", "check_samples", "check_union", "is_too_short"]


def check_union(numbers, total, remainder):
    """Checks the samples of all ranks in an epoch of a data set of the numbers 0 to `total - 1`."""
    assert set(numbers) <= set(range(total))
    if remainder == "uneven":
        assert sorted(numbers) == list(range(total))
    elif remainder == "pad":
        assert set(numbers) == set(range(total))
    else:
        assert len(set(numbers)) == len(numbers)


def check_samples(sizes, total, batch_size, remainder):
    """Checks the sizes of batches of samples, by rank.

    Args:
        sizes: of the batches of each rank.
        total: number of samples.
        batch_size: of a rank.
        remainder: as for `shard`.
    """
    fewest, more = divmod(total, len(sizes))
    if remainder == "uneven":
        assert [sum(each) - fewest for each in sizes] == [rank < more for rank in range(len(sizes))]
        for each in sizes:
            assert len(each) == -(-fewest // batch_size)
            assert set(each[:-1]) <= {batch_size} and 1 <= each[-1] <= batch_size + 1
    elif remainder == "pad":
        _check_equal(sizes, -(-total // len(sizes)), batch_size)
    else:
        _check_full(sizes, fewest, batch_size)


def check_files(sizes, counts, batch_size, remainder):
    """Checks the sizes of batches of ranks with different numbers of samples.

    Args:
        sizes: of the batches of each rank.
        counts: number of samples that each rank holds.
        batch_size: largest size of a batch.
        remainder: as for `shard`.
    """
    if remainder == "uneven":
        assert [sum(each) for each in sizes] == counts
        for each in sizes:
            assert len(each) == -(-max(counts) // batch_size)
            assert each == sorted(each, reverse=True) and each[0] - each[-1] <= 1 <= each[-1]
    elif remainder == "pad":
        _check_equal(sizes, max(counts), batch_size)
    else:
        _check_full(sizes, min(counts), batch_size)


def is_too_short(counts, batch_size, remainder):
    """Tells whether a rank has too few samples for the steps of the others."""
    return min(counts) == 0 or (
        remainder == "uneven" and min(counts) < -(-max(counts) // batch_size)
    )


def _check_equal(sizes, count, batch_size):
    assert all(each == sizes[0] for each in sizes)
    assert sum(sizes[0]) == count and set(sizes[0][:-1]) <= {batch_size}
    assert 1 <= sizes[0][-1] <= batch_size


def _check_full(sizes, count, batch_size):
    full = min(batch_size, count)
    assert all(each == [full] * (count // full) for each in sizes)
