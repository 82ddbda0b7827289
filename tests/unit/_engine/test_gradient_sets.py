"""What ranks do whose gradients differ."""

import pytest

from keras_dist._engine.gradient_sets import GradientSet, difference_of_sets, union

DENSE, ROWS = ("float32", None), ("float32", "int64")
NAMES = ("a", "b", "c")


def made(*forms, names=NAMES, adapts=True):
    return GradientSet(names, names, forms, adapts)


def test_a_gradient_is_dense_if_it_is_dense_on_one_rank():
    sets = [made(DENSE, None, ROWS), made(ROWS, None, None), made(None, None, ROWS)]
    assert union(sets) == (DENSE, None, ROWS)
    assert difference_of_sets(sets, range(3)) is None


def test_displayed_names_and_adaptation_are_not_compared():
    plain = GradientSet(("x",), ("a",), (DENSE,), True)
    assert plain.digest == GradientSet(("y",), ("a",), (DENSE,), False).digest
    assert plain.digest != GradientSet(("x",), ("b",), (DENSE,), True).digest
    assert plain.digest != GradientSet(("x",), ("a",), (ROWS,), True).digest


MANY = tuple(f"v{number}" for number in range(20))


def of_many(*names):
    return made(*[DENSE] * 20, names=names)


@pytest.mark.parametrize(
    ("first", "other", "rank", "expected", "received"),
    [
        (
            made(DENSE, None, DENSE),
            made(DENSE, None, names=("a", "b")),
            *(3, "gradients of 3 variables, 'a', 'b', 'c' as on rank 1", "2 variables, 'a', 'b'"),
        ),
        (
            made(DENSE, None, DENSE),
            made(DENSE, None, ("float16", None)),
            *(3, "the gradient of 'c' as on other ranks, float32", "float16"),
        ),
        (
            made(DENSE, None, ROWS, adapts=False),  # a compiled step has rows, another one does not
            made(DENSE, None, DENSE),
            *(1, "the gradient of 'c' as on other ranks, float32", "rows of float32"),
        ),
        (  # of many variables those are listed that differ
            of_many(*MANY),
            of_many(*MANY[:19], "w"),
            *(3, "gradients of 20 variables, 'v19' as on rank 1", "20 variables, 'w'"),
        ),
        (
            of_many(*MANY),
            of_many(*MANY[:18], "v19", "v18"),
            *(3, "gradients of 20 variables, 'v18', 'v19' as on rank 1"),
            "20 variables, 'v19', 'v18'",
        ),
    ],
)
def test_ranks_that_cannot_adapt_are_named(first, other, rank, expected, received):
    *found, text, _ = difference_of_sets([first, other], [1, 3])
    assert found == [rank, expected] and text.startswith(received)
