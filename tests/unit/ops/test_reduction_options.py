"""`ReductionOptions`: values, and arguments that are rejected. On one rank."""

import dataclasses
import types

import numpy as np
import pytest

import keras_dist
from keras_dist import _backends, _engine, errors, runtime
from keras_dist._engine import Compression, ReduceOp
from keras_dist.ops.reduction_options import (
    ReductionOptions,
    parse_groups,
    parse_layers,
    parse_passes,
    parse_predivide,
    parse_reduction_options,
)


class Variable:
    """Has the attribute by which Keras and TensorFlow variables are recognized."""

    def assign(self, value):
        raise NotImplementedError


class Parameter:
    """Has the attribute by which torch parameters are recognized."""

    requires_grad = True


def nothing(*args, **kwargs):
    pass


# Replaces the backend, which parsing does not need.
BACKEND = types.SimpleNamespace(
    name="none",
    **dict.fromkeys(["pin_device", "gpu_number", "limit_threads", "finish_calls"], nothing),
)


@pytest.fixture
def parsed(monkeypatch):
    """`parse_reduction_options` with default op, set and compression, in a job of one rank."""
    monkeypatch.setattr(_backends, "active", lambda: BACKEND)
    was_initialized = runtime.is_initialized()

    def parse(op="average", process_set=None, compression="none", **others):
        return parse_reduction_options(op, process_set, compression, **others)

    yield parse
    if not was_initialized:
        keras_dist.shutdown()


# --- Meaning

OTHERS = {
    "op": ReduceOp.SUM,
    "process_set": keras_dist.ProcessSet([0]),
    "sets": ((0,),),
    "compression": Compression.fp16,
    "predivide": 2.0,
    "sparse_as_dense": True,
    "groups": 2,
    "passes": 2,
    "averages": True,
    "scale_local": False,
    "shard_state": True,
    "local_steps": keras_dist.LocalSteps(4),
    "within": keras_dist.ProcessSet([0]),
}


def test_the_key_depends_on_every_field():
    others = [
        dataclasses.replace(ReductionOptions(), **{field: other}) for field, other in OTHERS.items()
    ]
    assert len({options.key for options in [ReductionOptions(), *others]}) == len(OTHERS) + 1
    assert set(OTHERS) == {field.name for field in dataclasses.fields(ReductionOptions)}
    assert (
        dataclasses.replace(ReductionOptions(), **OTHERS).key
        == dataclasses.replace(ReductionOptions(), **OTHERS).key
    )
    assert ReductionOptions() != ReductionOptions()  # variables in groups cannot be compared
    with pytest.raises(dataclasses.FrozenInstanceError):
        ReductionOptions().op = ReduceOp.SUM
    one, other = np.zeros(1), np.zeros(1)  # which can only be told apart by identity
    keys = [ReductionOptions(groups=groups).key for groups in (((one,),), ((other,),), ((one,),))]
    assert keys[0] == keys[2] and len(set(keys)) == 2


DEFAULTS = {
    "op": ReduceOp.AVERAGE,
    "process_set": None,
    "sets": (),
    "compression": Compression.none,
    "predivide": 1.0,
    "sparse_as_dense": False,
    "groups": (),
    "passes": 1,
    "averages": False,
    "scale_local": True,
    "shard_state": False,
    "local_steps": None,
    "within": None,
}


def test_defaults(parsed):
    assert vars(ReductionOptions()) == vars(parsed()) == DEFAULTS


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM])
def test_gradients_become_dense_on_request_and_under_adasum(op):
    assert ReductionOptions(op, sparse_as_dense=True).dense is True
    assert ReductionOptions(op).dense is (op is ReduceOp.ADASUM)


def test_rows_are_reduced_by_themselves_unless_an_option_needs_whole_gradients():
    assert ReductionOptions().takes_rows and ReductionOptions(ReduceOp.SUM).takes_rows
    fields = "compression groups passes local_steps shard_state sparse_as_dense".split()
    others = [{"op": ReduceOp.ADASUM}, *({field: OTHERS[field]} for field in fields)]
    assert not any(ReductionOptions(**other).takes_rows for other in others)


def test_ranks_of_each_step_with_and_without_local_steps():
    job, node, local = keras_dist.ProcessSet([0, 1]), keras_dist.ProcessSet([0]), {"local_steps": 4}
    each = ReductionOptions(process_set=job)
    alone = ReductionOptions(process_set=job, **local, groups=2, passes=3)
    within = ReductionOptions(process_set=job, **local, within=node)
    assert [one.is_local for one in (each, alone, within)] == [False, True, False]
    assert [one.each_step for one in (each, alone, within)] == [job, job, node]
    rounds = dataclasses.replace(within, groups=2, passes=3).of_rounds()
    assert vars(rounds) == {**DEFAULTS, "process_set": job}


def test_a_compression_is_one_of_gradients_or_of_messages():
    topk = Compression.topk(0.1)
    each, local = ReductionOptions(compression=topk), {"local_steps": 4}
    assert (each.gradient_compression, each.wire) == (topk, Compression.none)
    assert ReductionOptions(compression=topk, **local).gradient_compression is None  # of rounds
    narrow = ReductionOptions(compression=Compression.fp16)
    assert (narrow.gradient_compression, narrow.wire) == (None, Compression.fp16)


@pytest.mark.parametrize("wrong", ["op=Adasum", "shard_state=True"])
def test_error_feedback_needs_sums_and_whole_states(parsed, monkeypatch, wrong):
    monkeypatch.setattr(runtime, "size", lambda: 2)
    options = {"op": "adasum"} if wrong == "op=Adasum" else {"shard_state": True}
    with pytest.raises(errors.ArgumentError, match=f"Received: {wrong}"):
        parsed(compression=Compression.topk(0.1), **options)
    assert parsed(compression=Compression.topk(0.1)).compression == Compression.topk(0.1)


def test_passes_are_summed_unless_averaged():
    factors = [
        ReductionOptions(passes=passes, averages=averages).factor
        for passes, averages in ((1, False), (1, True), (3, False), (3, True))
    ]
    assert factors == [1.0, 1.0, 3.0, 1.0] and {type(one) for one in factors} == {float}


def test_a_predivided_average_is_a_sum_between_two_factors():
    assert ReductionOptions().scaling(4) == (ReduceOp.AVERAGE, 1.0, 1.0)
    assert ReductionOptions(ReduceOp.SUM).scaling(4) == (ReduceOp.SUM, 1.0, 1.0)
    assert ReductionOptions(predivide=2.0).scaling(8) == (ReduceOp.SUM, 0.5, 0.25)
    assert ReductionOptions(predivide=0.5).scaling(8) == (ReduceOp.SUM, 2.0, 0.0625)


def test_grouped_returns_indices_of_variables():
    a, b, c, d, e = variables = [np.zeros(1) for _ in range(5)]
    assert ReductionOptions().grouped(variables) == []
    assert ReductionOptions(groups=1).grouped(variables) == [[0, 1, 2, 3, 4]]
    assert ReductionOptions(groups=2).grouped(variables) == [[0, 1, 2], [3, 4]]
    assert ReductionOptions(groups=7).grouped(variables) == [[0], [1], [2], [3], [4]]
    assert ReductionOptions(groups=((e, a), (c,), ())).grouped(variables) == [[0, 4], [2]]
    assert ReductionOptions(groups=((a, b), (c, d))).grouped([d, e, a]) == [[2], [0]]


# --- Arguments


def test_every_argument_sets_its_field(parsed):
    variable = Variable()
    options = parsed(
        "SUM",
        compression="fp16",
        backward_passes_per_step=np.int64(3),
        average_aggregated_gradients=1,
        sparse_as_dense=1,
        groups=[[variable], []],
        scale_local_gradients=0,
        shard_state=1,
    )
    assert vars(options) == {
        **DEFAULTS,
        "op": ReduceOp.SUM,
        "compression": Compression.fp16,
        "sparse_as_dense": True,
        "groups": ((variable,), ()),
        "passes": 3,
        "averages": True,
        "scale_local": False,
        "shard_state": True,
    }
    flags = (options.sparse_as_dense, options.averages, options.scale_local, options.passes)
    assert [type(one) for one in flags] == [bool, bool, bool, int]
    assert parsed(gradient_predivide_factor=2).predivide == 2.0
    assert parsed("adasum").op is ReduceOp.ADASUM
    everyone = parsed(process_set=keras_dist.global_process_set)
    assert (everyone.process_set, everyone.sets) == (keras_dist.global_process_set, ())


def test_options_are_passed_by_name():
    with pytest.raises(TypeError, match="positional"):
        parse_reduction_options("average", None, "none", 2)


def test_only_adasum_checks_the_number_of_ranks(parsed, monkeypatch):
    checked = []
    monkeypatch.setattr(_engine.collectives, "check_power_of_two", checked.append)
    for op in ("average", "sum"):
        parsed(op)
    assert checked == []
    parsed("adasum")
    assert checked == [runtime.communicator()]


@pytest.mark.parametrize("number", [0, -1, 1.0, "1", True, None])
def test_passes_and_groups_are_positive_integers(number):
    is_integer = type(number) is int
    kind = errors.ArgumentError if is_integer else errors.ArgumentTypeError
    received = repr(number) if is_integer else f"{number!r} of type"
    with pytest.raises(kind, match=rf"\[here\] Expected .* to be 1 or more. Received: {received}"):
        parse_passes(number, "[here]")
    if number is not None:
        with pytest.raises(kind, match=rf"\[here\] Expected groups .* Received: {received}"):
            parse_groups(number, "[here]")
    for parse in (parse_passes, parse_groups):
        assert [parse(each, "[here]") for each in (1, 2, np.int8(3))] == [1, 2, 3]
        assert type(parse(np.int8(3), "[here]")) is int


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM])
def test_only_an_average_can_be_predivided(op):
    assert parse_predivide(1, op, "[here]") == 1.0
    for factor in (0.5, 2.0):
        if op is ReduceOp.AVERAGE:
            assert parse_predivide(factor, op, "[here]") == factor
            continue
        text = f"op to be Average with a .* Received: {op.value}"
        with pytest.raises(errors.ArgumentError, match=text):
            parse_predivide(factor, op, "[here]")


@pytest.mark.parametrize("factor", [0, -0.5])
def test_a_predivide_factor_is_positive(factor):
    text = rf"\[here\] Expected .* to be above 0. Received: {factor!r}\."
    with pytest.raises(errors.ArgumentError, match=text):
        parse_predivide(factor, ReduceOp.AVERAGE, "[here]")


def test_groups_are_lists_of_variables():
    a, b = Variable(), Parameter()
    assert parse_groups(None, "[here]") == ()
    assert parse_groups([], "[here]") == ()
    assert parse_groups([(a,), [b]], "[here]") == parse_groups(([a], (b,)), "[here]")
    assert parse_groups([(a,), [b]], "[here]") == ((a,), (b,))


@pytest.mark.parametrize(
    ("groups", "received"),
    [
        ([[Variable()], "kernel"], r".*'kernel'\] of type list"),
        ([["kernel"], [3]], "'kernel' of type str"),
        ([[Variable(), 3]], "3 of type int"),
    ],
)
def test_invalid_groups_are_rejected(groups, received):
    with pytest.raises(errors.ArgumentTypeError, match=rf"Expected groups .* Received: {received}"):
        parse_groups(groups, "[here]")


def test_layers_are_given_singly_or_in_a_collection(parsed):
    import keras

    a, b = keras.layers.Dense(1), keras.layers.Dense(1)
    assert parse_layers(None) == ()
    assert parse_layers(a) == (a,)
    for kind in (list, tuple, set, frozenset):
        assert parse_layers(kind([a, b])) == tuple(kind([a, b]))
    for wrong, received in (
        ("dense", "'dense' of type str"),
        ([a, 3, "b"], "3 of type int"),
        (0, "0"),
    ):
        with pytest.raises(errors.ArgumentTypeError, match=f"list of layers. Received: {received}"):
            parse_layers(wrong)
