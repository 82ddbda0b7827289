"""Descriptions of differences between ranks."""

import dataclasses

import pytest

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.compression import Compression
from keras_dist._engine.gradient_sets import GradientSet
from keras_dist._engine.signature import (
    BucketOptions,
    CollectiveSignature,
    Entry,
    JoinedRanks,
    OpOptions,
    difference,
    entries_of,
)

CALL = CollectiveSignature(
    "allreduce", (Entry("a", (3, 5), "f4"), Entry("b", (2,), "f4")), op="sum"
)


def changed(**fields):
    return dataclasses.replace(CALL, **fields)


def with_entries(first=CALL.entries[0], second=CALL.entries[1], *more):
    return changed(entries=(first, second, *more))


# Another call, what is expected of it, and what is received.
DIFFERENCES = [
    (CollectiveSignature("barrier"), "{call}", "barrier"),
    (CollectiveSignature("adasum"), "{call}", "adasum"),
    (changed(op="max"), "op='sum' in {call}", "op='max'"),
    (changed(root=0), "root_rank=None in {call}", "root_rank=0"),
    (changed(prescale=2.0), "prescale_factor=1.0 in {call}", "prescale_factor=2.0"),
    (changed(postscale=0.5), "postscale_factor=1.0 in {call}", "postscale_factor=0.5"),
    (changed(compression="fp16"), "compression='none' in {call}", "compression='fp16'"),
    (changed(key="n"), "name=None in {call}", "name='n'"),
    (with_entries(Entry("a", (3, 4), "f4")), "'a' with shape (3, 5) {first}", "(3, 4)"),
    (with_entries(Entry("x", (3,), "f4")), "'a' with shape (3, 5) {first}", "'x' (3,)"),
    (with_entries(Entry("A", (3, 6), "f4")), "'a' with shape (3, 5) {first}", "'A' (3, 6)"),
    (with_entries(CALL.entries[0], Entry("b", (2,), "f8")), "'b' with dtype f4 {first}", "f8"),
    (with_entries(CALL.entries[0], Entry("b", (2,), "b1")), "'b' with dtype f4 {first}", "b1"),
    (changed(entries=CALL.entries[:1]), "2 arrays in {call}", "1 arrays in allreduce('a')"),
    (
        with_entries(*CALL.entries, Entry("c", (1,), "i1")),
        "2 arrays in {call}",
        "3 arrays in allreduce('a', 'b', 'c')",
    ),
    (
        changed(buckets=((1, 0),)),
        "allreduce('a', 'b') in 0 buckets of gradients  {first}",
        "1 buckets of gradients [1, 0]",
    ),
    (changed(bucket=0), "bucket None of {call}", "bucket 0"),
    (changed(piece=0), "piece None of {call}", "piece 0"),
    (changed(launched=2), "allreduce('a', 'b') after 0 launches {first}", "2 launches"),
    (changed(launched=-1), "allreduce('a', 'b') after 0 launches {first}", "-1 launches"),
    (
        changed(first=True),
        "allreduce('a', 'b') not for the first time {first}",
        "for the first time",
    ),
]


@pytest.mark.parametrize(("other", "expected", "received"), DIFFERENCES)
def test_the_difference_is_named(other, expected, received):
    first = "as on rank 4"
    expected = expected.format(call=f"allreduce('a', 'b') {first}", first=first)
    assert difference([CALL, other, CALL], [4, 5, 7]) == (5, expected, received)


@pytest.mark.parametrize("count", [0, 4, 5])
def test_four_buckets_are_named(count):
    cut = [changed(buckets=((9,),)), changed(buckets=tuple((n,) for n in range(count)))]
    text = f"{count} buckets of gradients {'[0], [1], [2], [3]' * (count > 0)}"
    assert difference(cut, range(2))[2] == text + " ..." * (count > 4)


def test_digests_differ_in_every_compared_field():
    gradients = GradientSet(("a",), ("a",), (None,), adapts=True)
    others = {"library": "NCCL", "error": ValueError("wrong"), "gradients": gradients}
    others |= {"notice": "stop", "refused": ("n",)}
    calls = [CALL, *(call for call, *_ in DIFFERENCES)]
    calls += [changed(**{field: value}) for field, value in others.items()]
    assert len({call.digest for call in calls}) == len(calls)
    assert {len(call.digest) for call in calls} == {16}
    fields = {field.name for field in dataclasses.fields(CollectiveSignature)}
    compared = {f for f in fields for call in calls if getattr(call, f) != getattr(CALL, f)}
    assert fields - compared == {"spares", "takes_named", "ahead", "remedy"}
    renamed = changed(entries=(Entry("x", (3, 5), "f4"), Entry("y", (2,), "f4")))  # names are shown
    alike = changed(spares=True, takes_named=False, remedy="Look.")
    assert renamed.digest == alike.digest == CALL.digest
    assert difference([CALL, renamed], range(2)) is None


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
        library="",
        buckets=(),
        bucket=None,
        piece=None,
        launched=0,
        ahead=False,
        error=None,
        first=False,
        notice=None,
        refused=(),
        gradients=None,
        spares=False,
        takes_named=True,
        remedy="Call the same operations in the same order on every rank.",
    )
    options, plan = OpOptions(), BucketOptions(8)
    assert options == OpOptions(ReduceOp.AVERAGE, None, 1.0, 1.0, Compression.none, None)
    ways = dict.fromkeys(("lend", "overlaps", "counts_updates", "divides", "pooled"), False)
    assert plan == BucketOptions(
        8, None, (), (), True, "allreduce", plain.remedy, ranks=None, **ways
    )
    things = {"op": plain, "name": CALL.entries[0], "here": JoinedRanks((), ()), "key": options}
    for field, thing in {**things, "lend": plan}.items():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, "other")
    assert JoinedRanks((1,), (0,)) == JoinedRanks((1,), (0,)) != JoinedRanks((1,), (2,))


def test_three_arrays_are_named():
    calls = [
        CollectiveSignature("f", entries_of(map(str, range(count)), [((), "i4")] * count))
        for count in (0, 1, 3, 4, 9)
    ]
    names = ["", "('0')", "('0', '1', '2')"]
    names += [f"('0', '1', '2' and {more} more)" for more in (1, 6)]
    assert [*map(str, calls)] == [f"f{name}" for name in names]


def test_a_launch_ahead_of_the_rendezvous_is_the_only_one():
    ahead = changed(launched=5).launched_ahead
    assert ahead == changed(launched=1, ahead=True)
    assert ahead is not CALL.launched_ahead is CALL.launched_ahead


def test_entries_are_made_of_names_shapes_and_dtypes():
    assert entries_of(["a"], [([2, 3], "f4")]) == (Entry("a", (2, 3), "f4"),)
    with pytest.raises(ValueError, match="zip"):
        entries_of(["a", "b"], [((), "f4")])
    with pytest.raises(ValueError, match="zip"):
        difference([CALL], range(2))
