"""keras_dist.tensorflow, keras_dist.torch and keras_dist.jax: each operation in each form.

The backend of the job decides which of them; `face_tensorflow`, `face_torch` and `face_jax` say how
its tensors are made and read, and in which forms an operation can be called: at once, recorded for
a gradient, in a compiled step, queued, in place. What one of them has alone is in
`test_tensorflow_ops`, `test_torch_ops` and `test_jax_ops`.
"""

import importlib
import itertools
import re
import threading
import types
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
import numpy_reference
import pytest

import keras_dist
from keras_dist import errors

face = importlib.import_module(f"face_{keras.backend.backend()}")
hvd = face.hvd

pytestmark = pytest.mark.jobs("tensorflow-1", "tensorflow-2", "jax-2", "torch-4", "double-torch-3")

SIZE, RANK = keras_dist.size(), keras_dist.rank()
ODD = min(1, SIZE - 1)  # the rank that differs in tests of errors
NAMES = "allreduce grouped_allreduce allgather grouped_allgather broadcast alltoall".split()
NAMES += ["reducescatter", "grouped_reducescatter"]
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
differentiated = pytest.mark.parametrize("form", face.GRADIENTS)


@pytest.fixture(scope="module", autouse=True)
def started():
    hvd.init()


@pytest.fixture(params=["all ranks", "a process set"])
def process_set(request):
    """All ranks, or all but the first: a rank is not its place in the set."""
    if request.param == "all ranks":
        yield hvd.global_process_set
    elif SIZE == 1:
        pytest.skip("a set of one rank is all ranks")
    else:
        made = hvd.add_process_set(range(1, SIZE))
        yield made
        hvd.remove_process_set(made)


# --- What operations return, from the values of all members in the order of their ranks


def own(shape, dtype="float32", rank=RANK):
    """Returns an array of small integers, different on each rank."""
    numbers = (np.arange(np.prod(shape, dtype=int)) * (rank + 2) + rank) % 5 + 1
    return (numbers % 2 if dtype == "bool" else numbers).reshape(shape).astype(dtype_of(dtype))


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def expected(what, values, members, me, op="average", root_rank=0, splits=None, **options):
    """Returns the results of an operation on a rank.

    Args:
        what: name of the operation.
        values: of the members, in the order of their ranks; lists for a grouped operation.
        members: their ranks.
        me: the rank.
        op: of a reduction.
        root_rank: of broadcast, as an index in `members`.
        splits: of alltoall, a function of a rank and the number of members.
        **options: of a reduction.
    """
    count = len(members)
    call = types.SimpleNamespace(
        operation=what,
        op=getattr(op, "value", op).lower(),
        factors=(options.get("prescale_factor", 1), options.get("postscale_factor", 1)),
        root=root_rank,
        splits=splits and [list(splits(rank, count)) for rank in members],
        compression="none",
    )
    everyone = [flattened(value) for value in values]
    found = numpy_reference.expected(call, everyone, [range(count)], True)[members.index(me)]
    return [found[0], found[1].astype(face.COUNTS)] if splits else found


def call(form, name, value, options, process_set):
    """Calls an operation with tensors, and with options as they are in cases."""
    members, options = list(process_set.ranks), dict(options)
    if "splits" in options:
        options["splits"] = options["splits"](RANK, len(members))
    if "root_rank" in options:
        options["root_rank"] = members[options["root_rank"]]
    if process_set is not hvd.global_process_set:
        options["process_set"] = process_set
    result = face.operation(name, form)(value, **options)
    if "in place" in form:
        assert all(map(lambda one, other: one is other, flattened(result), flattened(value)))
    return result


def flattened(result):
    return list(result) if isinstance(result, list | tuple) else [result]


def check(found, wanted):
    """Checks values, type, dtype, shape and device of results."""
    device = face.kind_of(face.tensor(F2))[1]
    for one, other in zip(flattened(found), flattened(wanted), strict=True):
        if not (isinstance(one, np.ndarray) and other.dtype == face.COUNTS):  # of rows, on JAX
            assert isinstance(one, face.TENSOR)
            assert face.kind_of(one) == (other.dtype.name, device)
            one = face.array(one)
        assert one.shape == other.shape
        rounding = 0.0 if other.dtype.kind in "iub" else 2 * float(ml_dtypes.finfo(other.dtype).eps)
        wide = complex if other.dtype.kind == "c" else float
        np.testing.assert_allclose(one.astype(wide), other.astype(wide), rtol=rounding)


# --- Cases


class Case(NamedTuple):
    """A call: a dtype and a shape, or a list of each, which may be a function; and options."""

    dtype: Any
    shape: Any  # a function of a rank and the number of members varies between ranks
    options: dict

    def value(self, rank, members):
        shape = self.shape(rank, len(members)) if callable(self.shape) else self.shape
        if isinstance(self.dtype, str):
            return own(shape, self.dtype, rank)
        return [own(one, dtype, rank) for one, dtype in zip(shape, self.dtype, strict=True)]

    def works(self, form, members):
        """Returns whether the operation has this case in a form."""
        if "compression" in self.options:
            return "queued" not in form and "in place" not in form
        if self.options.get("op") == hvd.Adasum:
            return len(members) in (1, 2, 4)
        if "splits" in self.options and form == "jit":
            return False
        shapes = [[one.shape for one in flattened(self.value(rank, members))] for rank in (0, 1)]
        return form != "jit" or shapes[0] == shapes[1]

    def is_linear(self):
        op = self.options.get("op", "sum")
        is_plain = "compression" not in self.options and self.shape != LARGE
        return self.dtype == "float32" and is_plain and op in ("sum", "average", hvd.Sum)


def cases(dtypes, shapes, **options):
    """Returns a case for each dtype, each shape and each value of each option."""
    chosen = itertools.product(*options.values())
    combined = [dict(zip(options, values, strict=True)) for values in chosen]
    return [Case(*each) for each in itertools.product(dtypes, shapes, combined)]


EVERY, NUMBERS = face.DTYPES, [dtype for dtype in face.DTYPES if dtype != "bool"]
ORDERED = [dtype for dtype in face.DTYPES if dtype != "complex64"]
SCALED = [dtype for dtype in ORDERED if dtype != "bool"]
F, MIXED, LARGE = ["float32"], ("float32", "int32", "float16", "float32"), (40_001,)
OPS, FACTORS = ["average", hvd.Sum], {"prescale_factor": [0.5, 1], "postscale_factor": [3.0]}
COMPRESSIONS = [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16]
COMPRESSIONS += [face.Halved] if hasattr(face, "Halved") else []
TABLES = [  # of the splits of a rank
    lambda rank, count: list(range(1, count + 1)),
    lambda rank, count: np.array([(rank + 2 * place) % 3 for place in range(count)]),
    lambda rank, count: [0] * count,
    lambda rank, count: [3 * (rank == SIZE - 1)] + [0] * (count - 1),
]


def rows(kind, more=0):
    """Returns the shape of rows to send or to scatter; the last ones may not be sent."""
    if callable(kind):
        return lambda rank, count: (int(sum(kind(rank, count))) + more, 2)
    return lambda rank, count: (kind * count + more, 2)


CASES = {
    "allreduce": [
        *cases(NUMBERS, [(5, 3)], op=["average", hvd.Sum, "product"]),
        *cases(ORDERED, [(5, 3)], op=[hvd.Min, "Max"]),
        *cases(SCALED, [(5, 3)], op=["sum"], prescale_factor=[0.5], postscale_factor=[1.0, 3]),
        *cases(face.NARROW, [(2,)], op=["sum"]),
        *cases(
            ("float32", "int32", "bfloat16"),
            [(), (0,), LARGE],
            op=["SUM", hvd.Average],
            name=[None, "a name"],
        ),
        *cases(MIXED[:3], [(5,)], compression=COMPRESSIONS),
        *cases(F, [(1,)], op=[hvd.Adasum]),
    ],
    "grouped_allreduce": [
        *cases([MIXED], [[(3, 2), (4,), (), (0, 4)]], op=["SUM", *OPS], **FACTORS),
        *cases([NUMBERS * 2], [[(64,)] * 2 * len(NUMBERS)], name=[None, "a name"]),
        *cases([[*face.NARROW, *F]], [[(2,)] * (1 + len(face.NARROW))], op=["sum"]),
        *cases([MIXED[:2]], [[(3,)] * 2], compression=COMPRESSIONS),
        Case([], [], {}),
    ],
    "allgather": [
        *cases(EVERY, [(2, 3)], name=[None, "a name"]),
        *cases(EVERY, [lambda rank, count: (rank, 2)]),
    ],
    "grouped_allgather": [
        *cases([MIXED[:3]], [[(2, 2), (1,), (3, 0)]], name=[None, "a name"]),
        *cases([MIXED[:2]], [lambda rank, count: [(rank, 2), (1 + rank % 2,)]]),
    ],
    "broadcast": cases(EVERY, [(4, 2), (), (0, 2)], root_rank=[0, -1], name=[None, "a name"]),
    "alltoall": [
        *cases(EVERY, [rows(2)], name=[None, "a name"]),
        *[
            case
            for table in TABLES
            for case in cases(F, [rows(table), rows(table, 2)], splits=[table])
        ],
    ],
    "reducescatter": [
        *cases(SCALED, [rows(2, 1)], op=OPS, name=[None, "a name"]),
        *cases(F, [rows(1, -1), rows(2)], op=["SUM", *OPS], **FACTORS),
    ],
    "grouped_reducescatter": [
        *cases([MIXED[:3]], [[(5,), (1, 2), (4, 0)]], op=["SUM", *OPS], **FACTORS),
    ],
}


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in NAMES for form in face.FORMS if face.operation(name, form)],
)
def test_an_operation_in_a_form_equals_numpy(name, form, process_set):
    members = list(process_set.ranks)
    cases = [case for case in CASES[name] if case.works(form, members)]
    arrays = [case.value(RANK, members) for case in cases]
    plain = [one for value in arrays for one in flattened(value)]
    tensors = [face.tensor(one) for one in plain]

    def program(*tensors):
        rest, results = list(tensors), []
        for case, value in zip(cases, arrays, strict=True):
            given = [rest.pop(0) for _ in flattened(value)]
            value = given if isinstance(value, list) else given[0]
            results.append(call(form, name, value, case.options, process_set))
        return results

    if RANK not in members:
        with pytest.raises(errors.ArgumentError, match="to be in the process set"):
            program(*tensors)
        return
    results = face.run(form, program, *tensors)
    for case, found in zip(cases, results, strict=True):
        values = [case.value(rank, members) for rank in members]
        check(found, expected(name, values, members, RANK, **case.options))
    if "in place" not in form:
        check(tensors, plain)


# --- Gradients

# The factor between Horovod's gradient and that of the sum of all ranks' losses.
SLOPES = {
    "allgather": lambda count: 1 / count,
    "broadcast": lambda count: 1 / count,
    "reducescatter": lambda count: count,
}


def applied(name, case, process_set):
    """Returns an operation as a function of a tensor; one with a group takes integers as well."""

    def function(x):
        is_group = name.startswith("grouped_")
        value = [x, face.tensor(own((3,), "int32")), 3 * x] if is_group else x
        found = flattened(call("eager", name, value, case.options, process_set))
        return found[::2] if is_group else found[:1]

    return function


@differentiated
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_that_of_the_sum_of_the_losses_of_all_ranks(name, form, process_set):
    members, single = list(process_set.ranks), name.removeprefix("grouped_")
    factor, integers = SLOPES.get(single, lambda count: 1)(len(members)), own((3,), "int32")

    def check_gradient(case):
        arrays, place = [case.value(rank, members) for rank in members], members.index(RANK)

        def results_on(rank, arrays):
            given = [[one, integers, 3 * one] for one in arrays] if name != single else arrays
            found = expected(name, given, members, rank, **case.options)
            return np.concatenate([one.ravel() for one in found if one.dtype.kind == "f"])

        function = applied(name, case, process_set)
        weights = [
            np.arange(len(results_on(rank, arrays)), dtype="float32") + rank + 1 for rank in members
        ]
        found = face.gradient(form, function, arrays[place], weights[place])
        wanted = np.zeros_like(arrays[place])
        for index in np.ndindex(wanted.shape):  # the operation is linear
            unit = [np.zeros_like(one) for one in arrays]
            unit[place][index] = 1
            pairs = zip(weights, members, strict=True)
            wanted[index] = sum(weight @ results_on(rank, unit) for weight, rank in pairs)
        np.testing.assert_allclose(found, factor * wanted, rtol=1e-5)

    for case in CASES[single] if RANK in members else ():
        if case.is_linear() and case.works(form, members):
            check_gradient(case)


@pytest.mark.parametrize(
    ("name", "form"),  # compiled for single tensors and one kind of group
    [
        (name, form)
        for name in NAMES
        for form in face.GRADIENTS
        if form == "eager" or name not in ("grouped_allgather", "grouped_reducescatter")
    ],
)
def test_a_second_gradient_is_that_of_the_gradient(name, form, process_set):
    members, single = list(process_set.ranks), name.removeprefix("grouped_")
    share = 1 / len(members) if single in ("allgather", "broadcast") else 1  # as in Horovod
    linear = [one for one in CASES[single] if one.is_linear() and one.works(form, members)]
    for case in linear[:3] if RANK in members else ():
        function, x = applied(name, case, process_set), case.value(RANK, members)
        others = own(x.shape) + np.float32(RANK)
        sent = face.array(face.flat(function(face.tensor(others))))
        weights = np.arange(len(sent), dtype="float32") + RANK + 1
        wanted = face.gradient("eager", function, x, weights * sent * np.float32(share))
        found = face.second_gradient(form, function, x, weights, others)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@differentiated
def test_gradients_without_meaning(form):
    """An infinite one at another rank, and those of operations that are not linear."""
    last, infinite = SIZE - 1, np.full(3, np.inf, "float32")
    found = face.gradient(form, lambda x: [hvd.broadcast(x, last)], own((3,)), infinite)
    np.testing.assert_array_equal(found, np.full(3, np.inf if last == RANK else 0))
    with pytest.raises(errors.ArgumentError, match=face.NO_GRADIENT):
        face.gradient(form, lambda x: [hvd.allreduce(x, op="max")], own((2,)), F2)


# --- Errors, after each of which the job continues


def told_by(form, name, value, options, *kinds):
    """Returns the text of the error of a call."""
    is_grouped = isinstance(value, list)

    def program(*tensors):
        return face.operation(name, form)(list(tensors) if is_grouped else tensors[0], **options)

    with pytest.raises(face.raised_for(kinds, form)) as info:
        face.run(form, program, *map(face.tensor, flattened(value)))
    assert form in TRACED or isinstance(info.value, kinds)
    assert float(hvd.allreduce(face.tensor(F2), op=hvd.Sum)[0]) == SIZE
    told = str(info.value)
    return told[told.index("[rank") :]


# An operation, values and options of the other ranks and of the odd one, and what the text says.
F2, F3, HALF = np.ones(2, "float32"), np.ones(3, "float32"), np.ones(2, "float16")
MISMATCHES = [
    ("allreduce", (F2, F3), {}, "'value' with shape (2,)", "(3,)"),
    ("allreduce", (F2, HALF), {}, "'value' with dtype float32", "float16"),
    ("allreduce", (F2, F2), {"op": ("sum", "max")}, "op='sum' in allreduce('value')", "op='max'"),
    ("allreduce", (F2, F2), {"prescale_factor": (1, 2)}, "prescale_factor=1.0", "=2.0"),
    ("allreduce", (F2, F2), {"postscale_factor": (1, 2)}, "postscale_factor=1.0", "=2.0"),
    ("allreduce", (F2, F2), {"name": ("loss", "norm")}, "name='loss'", "name='norm'"),
    ("grouped_allreduce", ([F2], [F2, F2]), {}, "1 arrays in allreduce('value')", "2 arrays"),
    ("allgather", (F2[:, None], F2), {}, "'value' with shape (-1, 1)", "(-1,)"),
    ("allgather allreduce", (F2, F2), {}, "allgather('value')", "allreduce('value')"),
    ("grouped_allgather", ([F2, F2], [F2, HALF]), {}, "'values[1]' with dtype", "float16"),
    ("broadcast", (F2, F2), {"root_rank": (0, 1)}, "root_rank=0 in broadcast", "=1"),
    ("broadcast", (F2, F3), {"root_rank": (0, 0)}, "'value' with shape (2,)", "(3,)"),
    ("alltoall", (np.ones((SIZE, 1)), np.ones((SIZE, 2))), {}, "shape (-1, 1)", "(-1, 2)"),
    ("reducescatter", (F2, F3), {}, "'value' with shape (2,)", "(3,)"),
    (
        "grouped_reducescatter",
        ([F2, F2], [F2, F3]),
        {"name": ("x", "x")},
        "'x[1]' with shape",
        "(3,)",
    ),
]
TRACED = "graph", "jit"
FORMS = [form for form in face.FORMS if form != "recorded"]


@several
@pytest.mark.parametrize(("names", "values", "options", "wanted", "received"), MISMATCHES)
def test_a_mismatch_is_an_error_on_every_rank(names, values, options, wanted, received):
    mine = {key: pair[RANK == ODD] for key, pair in options.items()}
    for form in FORMS:
        differs_by_name = received == "name='norm'"  # by which queued operations match
        exists = all(face.operation(name, form) for name in names.split())
        if not exists or ("queued" in form and differs_by_name):
            continue
        name, value = names.split()[-1 if RANK == ODD else 0], values[RANK == ODD]
        told = told_by(form, name, value, mine, errors.MismatchError)
        before, after, *_ = told.split(" as on rank 0. Received: ")
        assert before.startswith(f"[rank 1 of {SIZE}] Expected ") and wanted in before
        assert received in after and re.search(r"(Call|must make) the same", after)


INVALID = [
    ("allreduce", F2, {"op": "median"}, "op to be one of average, sum"),
    ("allreduce", F2, {"prescale_factor": "two"}, "prescale_factor to be a finite number"),
    ("allreduce", F2, {"process_set": "even"}, "a keras_dist.ProcessSet"),
    ("grouped_allreduce", [F2], {"op": "median"}, "op to be one of average, sum"),
    ("allgather", F2[0], {}, "value to have at least one dimension, to gather along"),
    ("grouped_allgather", [F2, F2[0]], {}, "values[1] to have at least one dimension"),
    ("broadcast", F2, {"root_rank": SIZE}, f"root_rank to be a rank of this job, 0 to {SIZE - 1}"),
    ("alltoall", F2[0], {}, "value to have at least one dimension, to split along"),
    ("alltoall", F2, {"splits": [3] + [0] * (SIZE - 1)}, "at least 0 each, and 2 together at most"),
    ("alltoall", F2, {"splits": [1] * (SIZE + 1)}, f"splits to be {SIZE} integers, one for each"),
    ("reducescatter", F2[0], {}, "value to have at least one dimension, to scatter along"),
    ("reducescatter", F2, {"op": "max"}, "op to be Average or Sum in reducescatter"),
    ("grouped_reducescatter", [F2], {"op": "median"}, "op to be one of average, sum"),
]
if SIZE > 1:
    INVALID += [
        ("alltoall", np.ones(SIZE + 1), {}, f"the rows of value to be a multiple of {SIZE}")
    ]
if keras.backend.backend() != "jax":
    INVALID += [("allreduce", F2, {"average": True, "op": hvd.Sum}, "either op or average")]


@pytest.mark.parametrize("where", ["everywhere", pytest.param("on one rank", marks=several)])
@pytest.mark.parametrize(("name", "value", "options", "wanted"), INVALID)
def test_an_invalid_argument_is_an_error_on_every_rank(name, value, options, wanted, where):
    kinds = [errors.ArgumentError, errors.ArgumentTypeError]
    if where == "on one rank":
        kinds = [errors.KerasDistError]  # it may be seen as a mismatch
    if where == "on one rank" and RANK != ODD:
        value = [np.ones((SIZE,))] * len(value) if isinstance(value, list) else np.ones((SIZE,))
        options = {"root_rank": 0} if name == "broadcast" else {}
    for form in FORMS:
        is_unlike = where == "on one rank" or "splits" in options  # of which no step is traced
        if not face.operation(name, form) or (is_unlike and form in TRACED):
            continue
        told = told_by(form, name, value, options, *kinds)
        if where == "on one rank":
            assert len(set(keras_dist.allgather_object(told))) == 1
        else:
            parts = re.match(r"\[rank \d of \d\] Expected (.+)\. Received: .+\. .+", told, re.S)
            assert wanted in parts[1]


@several
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor_on_one_rank_is_an_error_on_every_rank(name):
    value = object() if RANK == ODD else face.tensor(np.ones(SIZE, "float32"))
    options = {"root_rank": 0} if name == "broadcast" else {}
    with pytest.raises(Exception, match=r"object|tensor|array") as info:
        face.operation(name, "eager")([value] if "grouped" in name else value, **options)
    assert RANK == ODD or f"[rank {ODD} of {SIZE}]" in str(info.value), info.value
    assert float(hvd.allreduce(face.tensor(F2), op=hvd.Sum)[0]) == SIZE


# --- Names, ranks without data, objects, and other arguments


@pytest.mark.parametrize("name", NAMES)
def test_named_operations_of_threads_match_in_any_order(name):
    members, results, is_grouped = list(range(SIZE)), {}, name.startswith("grouped_")

    def value_of(number, rank):
        value = own((SIZE, 2), rank=rank) + np.float32(number)
        return [value] if is_grouped else value

    def work(number):
        value = face.tensor(own((SIZE, 2)) + np.float32(number))
        options = {"name": f"loss {number}", **({"root_rank": 0} if name == "broadcast" else {})}
        results[number] = getattr(hvd, name)([value] if is_grouped else value, **options)

    order = np.random.default_rng(RANK).permutation(4).tolist()
    threads = [threading.Thread(target=work, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in order:
        values = [value_of(number, rank) for rank in members]
        check(results[number], expected(name, values, members, RANK, root_rank=0))


def test_join_averages_over_ranks_with_data():
    for step in range(SIZE - RANK):
        here = [rank for rank in range(SIZE) if step < SIZE - rank]
        found = hvd.allreduce(face.tensor(np.full(3, RANK, "float32")))
        check(found, np.full(3, np.mean(here), "float32"))
    assert int(hvd.join()) == 0  # rank 0 has most data, on all ranks


def test_objects_and_barriers(process_set):
    members = list(process_set.ranks)
    if RANK in members:
        value = {"rank": RANK, "tensor": np.full(2, RANK)}
        last = hvd.broadcast_object(value, root_rank=members[-1], process_set=process_set)
        assert last["rank"] == members[-1] and last["tensor"].tolist() == [members[-1]] * 2
        everyone = hvd.allgather_object(value, process_set=process_set)
        assert [each["rank"] for each in everyone] == members
        hvd.barrier(process_set=process_set)


def test_the_weights_of_a_model_are_those_of_the_root(process_set):
    members = list(process_set.ranks)
    for root in members if RANK in members else ():
        dtypes = [dtype for dtype in face.DTYPES if dtype != "complex64"]
        arrays = [own((3, 2), dtype) for dtype in dtypes] + [own((), "float32")]
        found = face.broadcast_state(arrays, root, process_set=process_set)
        for one, other in zip(found, arrays, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, own(other.shape, other.dtype.name, root))


@pytest.mark.parametrize("form", face.GRADIENTS)
def test_the_average_of_integers_does_not_overflow(form):
    kinds = [np.dtype(name) for name in face.DTYPES if np.dtype(dtype_of(name)).kind in "iu"]
    limits = [np.array([np.iinfo(kind).min, np.iinfo(kind).max], kind) for kind in kinds]
    tensors = map(face.tensor, limits)
    found = face.run(form, lambda *given: [hvd.allreduce(one) for one in given], *tensors)
    for result, wanted in zip(found, limits, strict=True):
        check(result, wanted)


if hasattr(face, "sparse_allreduce"):

    @pytest.mark.parametrize("form", face.GRADIENTS)
    @pytest.mark.parametrize("op", ["sum", hvd.Average])
    @pytest.mark.parametrize("shape", [(SIZE + 1, 3), (SIZE + 1,)], ids=str)
    def test_sparse_tensors_equal_dense_ones(shape, op, form, process_set):
        members = list(process_set.ranks)
        if RANK not in members:
            return

        def table(rank):  # row 0 comes twice, and one that differs between ranks
            return np.array([0, rank + 1, 0]), own((3, *shape[1:]), "float32", rank)

        indices, values = table(RANK)
        options = {"op": op, "name": "table", "process_set": process_set}
        found = face.sparse_allreduce(form, values, indices, shape, **options)
        wanted = np.zeros(shape, "float32")
        for rank in members:
            np.add.at(wanted, *table(rank))
        check(found, wanted if op == "sum" else wanted / len(members))

    def test_the_argument_average_is_deprecated():
        tensor = face.tensor(own((3,)))
        for average, op in ((False, hvd.Sum), (True, hvd.Average)):
            with pytest.warns(DeprecationWarning, match=rf"op=hvd\.{op.name.title()}") as warned:
                found = hvd.allreduce(tensor, average=average)
            assert warned[0].filename == __file__
            values, members = [own((3,), rank=rank) for rank in range(SIZE)], list(range(SIZE))
            check(found, expected("allreduce", values, members, RANK, op))

    @pytest.mark.parametrize("form", face.GRADIENTS)
    @pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
    def test_compression_of_tensors(name, form):
        compression = getattr(hvd.Compression, name)
        narrow = {"none": None, "fp16": "float16", "bf16": "bfloat16"}[name]
        for dtype in ("float32", "float64", "int32", "bool"):
            given = np.array([0, 1, 1]).astype(dtype)

            def both(tensor):
                small, context = compression.compress(tensor)
                return small, compression.decompress(small, context)

            small, back = face.run(form, both, face.tensor(given))
            check(small, given.astype(dtype_of(narrow)) if narrow and "float" in dtype else given)
            check(back, given)
