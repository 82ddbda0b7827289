"""Descriptions of differences between ranks."""

import dataclasses

import pytest

from keras_dist._engine.gradient_sets import GradientSet
from keras_dist._engine.signature import (
    CollectiveSignature,
    Entry,
    JoinedRanks,
    difference,
    entries_of,
)

CALL = CollectiveSignature(
    "allreduce", (Entry("a", (3, 5), "float32"), Entry("b", (2,), "float32")), op="sum"
)


def changed(**fields):
    return dataclasses.replace(CALL, **fields)


def test_equal_calls_agree():
    assert difference([CALL, changed(), CALL], range(3)) is None


def test_names_of_arrays_are_shown_but_not_compared():
    other = changed(entries=(Entry("x", (3, 5), "float32"), Entry("y", (2,), "float32")))
    assert difference([CALL, other], range(2)) is None


@pytest.mark.parametrize(
    ("other", "expected", "received"),
    [
        (CollectiveSignature("barrier"), "allreduce('a', 'b') as on rank 0", "barrier"),
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
        (changed(piece=1), "piece None of allreduce('a', 'b') as on rank 0", "piece 1"),
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
        (
            changed(entries=(Entry("x", (3,), "float32"), CALL.entries[1])),
            "'a' with shape (3, 5) as on rank 0",
            "'x' (3,)",
        ),
        (
            changed(entries=(Entry("A", (3, 6), "float32"), CALL.entries[1])),
            "'a' with shape (3, 5) as on rank 0",
            "'A' (3, 6)",
        ),
        (
            changed(entries=(CALL.entries[0], Entry("b", (2,), "bfloat16"))),
            "'b' with dtype float32 as on rank 0",
            "bfloat16",
        ),
        (CollectiveSignature("adasum"), "allreduce('a', 'b') as on rank 0", "adasum"),
        (CollectiveSignature("send"), "allreduce('a', 'b') as on rank 0", "send"),
        (
            changed(prescale=2.0),
            "prescale_factor=1.0 in allreduce('a', 'b') as on rank 0",
            "prescale_factor=2.0",
        ),
        (
            changed(buckets=((1, 0),)),
            "allreduce('a', 'b') in 0 buckets of gradients  as on rank 0",
            "1 buckets of gradients [1, 0]",
        ),
        (changed(bucket=1), "bucket None of allreduce('a', 'b') as on rank 0", "bucket 1"),
    ],
)
def test_the_difference_is_named(other, expected, received):
    assert difference([CALL, CALL, other], range(3)) == (2, expected, received)


def test_a_call_with_fewer_buckets_is_named():
    cut = [changed(buckets=buckets) for buckets in (((0,), (1,)), ((0, 1),), ())]
    assert difference(cut[:2], range(2))[2] == "1 buckets of gradients [0, 1]"
    assert difference(cut[1:], range(2))[2] == "0 buckets of gradients "


def test_ranks_have_their_numbers_in_the_job():
    found = difference([CALL, CollectiveSignature("barrier"), CALL], [4, 5, 7])
    assert found == (5, "allreduce('a', 'b') as on rank 4", "barrier")


def test_one_array_of_several_is_found():
    longer = changed(entries=(*CALL.entries, Entry("c", (1,), "int8")))
    assert difference([CALL, longer], range(2))[1:] == (
        "2 arrays in allreduce('a', 'b') as on rank 0",
        "3 arrays in allreduce('a', 'b', 'c')",
    )


OTHER_VALUES = {
    "operation": "allgather",
    "entries": CALL.entries[:1],
    "op": "max",
    "root": 0,
    "key": "n",
    "prescale": 2.0,
    "postscale": 2.0,
    "compression": "fp16",
    "library": "NCCL",
    "buckets": ((0, 1),),
    "bucket": 0,
    "piece": 0,
    "error": ValueError("wrong"),
    "launched": 1,
    "first": True,
    "notice": "stop",
    "refused": ("n",),
    "gradients": GradientSet(("a",), ("a",), (None,), adapts=True),
}


def test_digests_differ_in_every_compared_field():
    calls = [CALL, *(changed(**{field: value}) for field, value in OTHER_VALUES.items())]
    assert len({call.digest for call in calls}) == len(calls)
    assert {len(call.digest) for call in calls} == {16}
    assert changed(spares=True, takes_named=False, remedy="Look.").digest == CALL.digest
    assert {field.name for field in dataclasses.fields(CollectiveSignature)} == {
        *OTHER_VALUES,
        "spares",
        "takes_named",
        "ahead",
        "remedy",
    }


def test_a_signature_is_immutable():
    plain = CollectiveSignature("allreduce")
    assert plain == CollectiveSignature(
        "allreduce",
        (),
        op=None,
        root=None,
        key=None,
        prescale=1.0,
        postscale=1.0,
        compression="none",
        buckets=(),
        bucket=None,
        error=None,
        first=False,
        notice=None,
        refused=(),
        gradients=None,
        spares=False,
        remedy="Call the same operations in the same order on every rank.",
    )
    for thing, field in ((plain, "op"), (CALL.entries[0], "name"), (JoinedRanks((), ()), "here")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, "other")
    assert JoinedRanks((1,), (0,)) == JoinedRanks((1,), (0,)) != JoinedRanks((1,), (2,))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "allreduce"),
        (1, "allreduce('0')"),
        (3, "allreduce('0', '1', '2')"),
        (4, "allreduce('0', '1', '2' and 1 more)"),
        (9, "allreduce('0', '1', '2' and 6 more)"),
    ],
)
def test_three_arrays_are_named(count, text):
    assert (
        str(
            CollectiveSignature(
                "allreduce", entries_of(map(str, range(count)), [((), "i4")] * count)
            )
        )
        == text
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (4, "4 buckets of gradients [0], [1], [2], [3]"),
        (5, "5 buckets of gradients [0], [1], [2], [3] ..."),
    ],
)
def test_four_buckets_are_named(count, text):
    cut = changed(buckets=tuple((number,) for number in range(count)))
    assert difference([CALL, cut], range(2))[2] == text


def test_entries_are_made_of_names_shapes_and_dtypes():
    assert entries_of(["a"], [([2, 3], "f4")]) == (Entry("a", (2, 3), "f4"),)
    with pytest.raises(ValueError, match="zip"):
        entries_of(["a", "b"], [((), "f4")])
    with pytest.raises(ValueError, match="zip"):
        difference([CALL], range(2))
