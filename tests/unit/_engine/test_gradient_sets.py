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


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            made(DENSE, None, names=("a", "b")),
            (3, "gradients of 3 variables, 'a', 'b', 'c' as on rank 1", "2 variables, 'a', 'b'"),
        ),
        (
            made(DENSE, None, ("float16", None)),
            (3, "the gradient of 'c' as on other ranks, float32", "float16"),
        ),
        (
            made(DENSE, None, ("float32", "int32")),
            (1, "the gradient of 'c' as on other ranks, float32", "rows of float32"),
        ),
    ],
)
def test_ranks_that_cannot_adapt_are_named(other, expected):
    first = made(DENSE, None, DENSE)
    if other.forms[-1] == ("float32", "int32"):  # a compiled step has rows, another one does not
        first, other = made(DENSE, None, ROWS, adapts=False), made(DENSE, None, DENSE)
    rank, text, received, _ = difference_of_sets([first, other], [1, 3])
    assert (rank, text) == expected[:2]
    assert received.startswith(expected[2])


def test_of_many_variables_those_are_listed_that_differ():
    names = tuple(f"v{number}" for number in range(20))
    odd = (*names[:19], "w")
    _, expected, received, _ = difference_of_sets(
        [made(*[DENSE] * 20, names=names), made(*[DENSE] * 20, names=odd)], [0, 1]
    )
    assert expected == "gradients of 20 variables, 'v19' as on rank 0"
    assert received == "20 variables, 'w'"
    swapped = (*names[:18], names[19], names[18])
    _, expected, received, _ = difference_of_sets(
        [made(*[DENSE] * 20, names=names), made(*[DENSE] * 20, names=swapped)], [0, 1]
    )
    assert received == "20 variables, 'v19', 'v18'"
