"""Who differs, and in what, in words a user can act on."""

import pytest

from keras_dist._engine.agreement import Call, Entry, difference

CALL = Call("allreduce", (Entry("a", (3, 5), "float32"), Entry("b", (2,), "float32")), op="sum")


def changed(**fields):
    import dataclasses

    return dataclasses.replace(CALL, **fields)


def test_equal_calls_agree():
    assert difference([CALL, changed(), CALL], range(3)) is None


def test_names_of_arrays_are_shown_but_not_compared():
    other = changed(entries=(Entry("x", (3, 5), "float32"), Entry("y", (2,), "float32")))
    assert difference([CALL, other], range(2)) is None


@pytest.mark.parametrize(
    ("other", "expected", "received"),
    [
        (Call("barrier"), "allreduce('a', 'b') as on rank 0", "barrier"),
        (changed(op="max"), "op='sum' in allreduce('a', 'b') as on rank 0", "op='max'"),
        (changed(root=1), "root_rank=None in allreduce('a', 'b') as on rank 0", "root_rank=1"),
        (
            changed(postscale=0.5),
            "postscale_factor=1.0 in allreduce('a', 'b') as on rank 0",
            "postscale_factor=0.5",
        ),
        (
            changed(compression="fp16"),
            "compression='none' in allreduce('a', 'b') as on rank 0",
            "compression='fp16'",
        ),
        (changed(key="n"), "name=None in allreduce('a', 'b') as on rank 0", "name='n'"),
        (
            changed(entries=(Entry("a", (3, 4), "float32"), CALL.entries[1])),
            "'a' with shape (3, 5) as on rank 0",
            "(3, 4)",
        ),
        (
            changed(entries=(CALL.entries[0], Entry("b", (2,), "float64"))),
            "'b' with dtype float32 as on rank 0",
            "float64",
        ),
        (
            changed(first=True),
            "allreduce('a', 'b') not for the first time as on rank 0",
            "for the first time",
        ),
        (
            changed(entries=CALL.entries[:1]),
            "2 arrays in allreduce('a', 'b') as on rank 0",
            "1 arrays in allreduce('a')",
        ),
    ],
)
def test_the_difference_is_named(other, expected, received):
    assert difference([CALL, CALL, other], range(3)) == (2, expected, received)
