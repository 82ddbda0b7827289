"""Programs of collectives that are drawn, and the results of numpy: in rank order, to the bit.

A program repeats some calls with other numbers: blocking and queued, with and without a name, while
ranks hold, drop and write to earlier results. All ranks draw the same program from its number.
CONFORMANCE_SEED in the environment draws others, and CONFORMANCE_COUNT sets how many.
"""

import dataclasses
import functools
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy_reference import COMPRESSIONS, UFUNCS, bits, expected

import keras_dist
from keras_dist import _engine, runtime
from keras_dist._engine.collectives import slices
from keras_dist.ops import reductions

__all__ = ["COUNT", "SEED", "Execution", "Program", "draw", "execute", "prepare"]

SEED = int(os.environ.get("CONFORMANCE_SEED", "0"))
COUNT = int(os.environ.get("CONFORMANCE_COUNT", "0"))  # 0: as many as the test draws
STEPS = 14

FLOATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "longdouble"]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
COMPLEX = ["complex64", "complex128"]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, "bool"]
SHAPES = [(), (0,), (1,), (3, 5), (0, 4), (17,), (257, 3), (2, 0, 3), (1500,), (5000,)]
LARGE = [(33_000,), (40_001,), (300, 301), (150_000,)]  # around the limits, which grow by dtype
OPERATIONS = [
    *["allreduce"] * 6,
    *["grouped_allreduce"] * 3,
    *["reducescatter", "grouped_reducescatter", "sparse_allreduce", "sparse_allreduce"],
    *["allgather", "grouped_allgather", "alltoall", "broadcast", "broadcast_", "adasum"],
    *["compressed_allreduce"] * 3,
]
# Intervals of indices of rows.
INDICES = {
    "int64": [(-6, 6), (2**40, 2**40 + 2**20), (-(2**63), 2**63 - 1)],
    "int32": [(0, 3000), (-(2**31), 2**31 - 1)],
    "uint8": [(0, 3), (0, 255)],
    "uint64": [(0, 2**64 - 1)],
}
# Sizes in bytes at which the engine changes the method, so low that small arrays use each.
LOW = {
    ("SMALL_NBYTES", 128 * 1024): 512,
    ("SMALL_NBYTES", 32 * 1024): 256,
    ("WHOLE_NBYTES", 32 * 1024): 256,
    ("WHOLE_NBYTES", 64 * 1024): 512,
    ("MAX_PAYLOAD_NBYTES", 64 * 1024): 1024,
    ("EAGER_NBYTES", 32 * 1024): 256,
    ("CHUNK_NBYTES", 512 * 1024): 4096,
    ("BLOCK_NBYTES", slices.BLOCK_NBYTES): 512,
    ("PIECE_NBYTES", 2**23): 1024,
    ("SMALLEST_NBYTES", 2**16): 64,
    ("MAX_NBYTES", 2**30): 5000,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective, and its arguments on all ranks.

    Args:
        operation: its name.
        arrays: the dtype of each array, and its shape on each rank.
        op: the reduction.
        factors: of contributions and of results.
        root: the rank whose arrays are sent.
        splits: number of rows that each rank sends to each, if it says so.
        compression: wire format between nodes.
        layout: how arrays lie in memory.
    """

    operation: str
    arrays: Sequence[Any]
    op: str = "sum"
    factors: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    splits: Any = None
    compression: Any = "none"
    layout: str = "C"


@dataclasses.dataclass(frozen=True)
class Program:
    """Calls, and how the engine runs them.

    Args:
        number: of the program.
        calls: the calls.
        steps: for each step the index of its call, and how it is called.
        everyone: for each step the arrays of each rank.
        reduce: how ranks of a node reduce; `"refused"`: they cannot share further memory.
        links: up to which size in bytes nodes halve arrays, and whether the links are slow.
        is_low: whether the limits of `LOW` hold.
        bucket_nbytes: size in bytes at which a bucket is closed.
    """

    number: int
    calls: Sequence[Call]
    steps: Sequence[tuple[int, str]]
    everyone: Sequence[Sequence[Sequence[np.ndarray]]]
    reduce: str
    links: tuple[int, bool]
    is_low: bool
    bucket_nbytes: int

    def __str__(self):
        way = f"{self.reduce}, {'low' if self.is_low else 'usual'} limits, {self.links}"
        return f"program {self.number} with CONFORMANCE_SEED={SEED} ({way})"


def draw(number, size):
    """Returns a program of some ranks."""
    one = random.Random(f"{SEED} {size} {number}")
    is_low = one.random() < 0.7
    shapes = SHAPES if is_low else SHAPES + LARGE
    calls = [draw_call(one, size, shapes) for _ in range(4)]
    ways = ["blocking"] * 5 + ["out", "plan", "plan", "queued", "queued", "named", "late, named"]
    steps = [(one.randrange(len(calls)), one.choice(ways)) for _ in range(STEPS)]
    rng = np.random.default_rng([SEED, number, size])
    everyone = [contributions(calls[index], size, rng) for index, _ in steps]
    return Program(
        number,
        calls,
        steps,
        everyone,
        one.choice(["copy", "copy", "copy", "mpi", "refused"]),
        one.choice([(0, False), (2**22, False), (0, True)]),
        is_low,
        one.choice([1, 1000, 25 * 2**20]),
    )


def draw_call(one, size, shapes):
    operation = one.choice(OPERATIONS)
    if operation == "adasum" and size & (size - 1):
        operation = "allreduce"
    count = one.choice([0, 1, 2, 4]) if operation.startswith(("grouped", "broadcast_")) else 1
    op, dtypes = "sum", DTYPES
    compresses = operation == "compressed_allreduce"
    if compresses:
        operation, op, dtypes = "allreduce", one.choice([*UFUNCS]), ["float32", "float64"]
        shapes = [shape for shape in shapes if math.prod(shape) > 256]  # small ones travel as are
    elif operation == "adasum":
        operation, op, dtypes = "allreduce", "adasum", FLOATS
        if one.random() < 0.5:
            operation, count = "grouped_allreduce", 2
    elif "allreduce" in operation or "reducescatter" in operation:
        dense = operation in ("allreduce", "grouped_allreduce")
        op = one.choice([*UFUNCS] if dense else ["sum", "average"])
        dtypes = dtypes_of(op)
        if operation == "sparse_allreduce" and one.random() < 0.5:
            dtypes = FLOATS  # the order of their sums shows
    dtype = [one.choice(dtypes) for _ in range(count)]
    has_rows = operation not in ("allreduce", "grouped_allreduce", "broadcast", "broadcast_")
    arrays = []
    for name in dtype:
        shape = one.choice([shape for shape in shapes if shape or not has_rows])
        rows = [shape] * size
        if operation in ("allgather", "grouped_allgather", "alltoall", "sparse_allreduce"):
            rows = [(one.choice([0, 1, 3, 40, 300]), *shape[1:]) for _ in range(size)]
        arrays.append((name, rows))
    splits = None
    if operation == "alltoall":
        [(name, rows)] = arrays
        if one.random() < 0.3:
            arrays = [(name, [(size * one.randrange(4), *row[1:]) for row in rows])]
        else:
            splits = [[one.choice([0, 1, 2, 5]) for _ in range(size)] for _ in range(size)]
            more = one.choice([0, 2])
            rows = [(sum(each) + more, *row[1:]) for each, row in zip(splits, rows, strict=True)]
            arrays = [(name, rows)]
    if operation == "sparse_allreduce":
        arrays.append((one.choice([*INDICES]), [row[:1] for row in arrays[0][1]]))
    factors, compression = (1.0, 1.0), "none"
    if op != "adasum" and "reduce" in operation and "sparse" not in operation:
        whole = any(np.dtype(name).kind in "iu" for name in dtype)
        if one.random() < 0.3 and "bool" not in dtype:
            some = [0.0, 0.5, 1 / 3, 1.0] if whole else [0.5, -2.0, 1 / 3, 0.7, 1.0]
            factors = one.choice(some), one.choice(some)
        if operation == "allreduce" and dtype[0] in ("float32", "float64"):
            compression = one.choice([*COMPRESSIONS] if compresses else ["none", *COMPRESSIONS])
    layout = one.choice(["C", "C", "F", "strided", "swapped"])
    root = one.randrange(size)
    return Call(operation, tuple(arrays), op, factors, root, splits, compression, layout)


def dtypes_of(op):
    """Returns the dtypes that a reduction takes."""
    without = {"min": COMPLEX, "max": COMPLEX, "sum": ["bool"], "average": ["bool"]}
    return [name for name in DTYPES if name not in without.get(op, ())]


# --- Numbers


def contributions(call, size, rng):
    """Returns the arrays of each rank."""
    everyone = [
        [numbers(call, np.dtype(name), rows[rank], rng) for name, rows in call.arrays]
        for rank in range(size)
    ]
    if call.operation == "sparse_allreduce":
        dtype = call.arrays[1][0]
        low, high = INDICES[dtype][rng.integers(len(INDICES[dtype]))]
        places = rng.integers(low, high, rng.choice([3, 200]), dtype, endpoint=True)
        everyone = [[rows, rng.choice(places, len(rows))] for rows, _ in everyone]
    return everyone


def numbers(call, dtype, shape, rng):
    count = math.prod(shape)
    if dtype == np.bool_:
        found = rng.random(count) < 0.7
    elif dtype.kind == "c":  # exact in products, whose rounding may depend on the place in memory
        found = rng.integers(1, 3, count) + 1j * rng.integers(1, 3, count)
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = max(limits.min, -40), 40
        if call.factors == (1.0, 1.0) and count <= 500:
            low, high = limits.min, limits.max
        if call.operation == "sparse_allreduce" and dtype.itemsize == 8:
            low, high = low // 2**12, high // 2**12  # the average of equal indices must fit
        found = rng.integers(low, high, count, dtype, endpoint=True)
        found[: count // 3] = rng.choice(np.array([low, low + 1, high], dtype), count // 3)
    else:
        found = rng.standard_normal(count) * (1 if dtype.itemsize == 1 else 20)
        if call.op in ("sum", "average") and dtype.kind == "f" and count > 20:
            found[:7] = rng.choice([np.inf, -np.inf, np.nan, -0.0, 1e38, 1e-40, 1.0], 7)
    with np.errstate(all="ignore"):
        return np.asarray(found).astype(dtype).reshape(shape)


def laid_out(array, layout):
    """Returns an equal array that lies in memory, or holds its bytes, as the layout says."""
    if layout == "F":
        return np.array(array, order="F")
    if layout == "strided" and array.ndim:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if layout == "swapped" and array.dtype.isbuiltin == 1:
        return array.astype(array.dtype.newbyteorder())
    return array.copy()


# --- The run


def prepare(monkeypatch, is_low, bucket_nbytes):
    """Sets the limits of a program, and makes `process_set=` take a communicator."""
    engine = [each for name, each in sys.modules.items() if name.startswith("keras_dist._engine")]
    for module in engine if is_low else ():
        for (name, usual), low in LOW.items():
            if vars(module).get(name) == usual:
                monkeypatch.setattr(module, name, low)
    real = runtime.communicator

    def communicator(given=None):
        return given if isinstance(given, _engine.Communicator) else real(given)

    monkeypatch.setattr(runtime, "communicator", communicator)
    monkeypatch.setattr(reductions, "bucket_nbytes", lambda: bucket_nbytes)


def communicator_of(program, mpi):
    """Returns the ranks of a program. Collective: every rank; blocks."""
    reduce = "mpi" if program.reduce == "mpi" else "copy"
    comm = _engine.Communicator(mpi, None, reduce)
    comm.halving_nbytes, comm.links_are_slow = program.links
    if program.reduce == "refused" and comm.node is not None:
        comm.warn_no_shared_memory = lambda reason: None
        comm.node.segment = lambda *_, **__: (None, "on purpose")
    return comm


def execute(program, mpi):
    """Runs a program. Collective: every rank; blocks.

    Args:
        program: the program.
        mpi: the module `MPI` of mpi4py.

    Returns:
        What is wrong, on this rank.
    """
    comm = communicator_of(program, mpi)
    execution = Execution(program, comm)
    execution.run()
    comm.free()
    execution.check_held()  # results outlive their ranks
    return execution.wrong


class Execution:
    """A run of a program on one rank, which makes choices of its own as well."""

    def __init__(self, program, comm):
        self.program, self.comm = program, comm
        self.has_memory = comm.node is not None and program.reduce != "refused"
        self.mine = random.Random(f"{program.number} {comm.rank}")
        self.wrong = []
        self.held = []
        self.queued = []
        # Calls by name that other ranks may have made, and those made: waits follow the last call.
        self.late = []
        self.named = []
        self.plans = {}

    def run(self):
        for number in range(len(self.program.steps)):
            if self.mine.random() < 0.2:
                time.sleep(self.mine.random() * 2e-3)
            self.step(number)
            if self.mine.random() < 0.3:
                self.finish(self.queued)
            if self.mine.random() < 0.3:
                self.call_late()
            self.check_held()
            self.mine.shuffle(self.held)
            del self.held[self.mine.randrange(6) :]
        self.call_late()
        self.finish(self.queued)
        self.finish(self.named)

    def step(self, number):
        index, way = self.program.steps[number]
        call, everyone = self.program.calls[index], self.program.everyone[number]
        what = f"step {number}, {way}, of {self.program}: {call}"
        with np.errstate(all="ignore"):
            nodes = self.comm.topology.nodes
            results = expected(call, everyone, nodes, self.has_memory)[self.comm.rank]
        given = [laid_out(array, call.layout) for array in everyone[self.comm.rank]]
        before = None if call.operation == "broadcast_" else [bits(array) for array in given]
        case = (what, given, before, [bits(each) for each in results])
        start = functools.partial(begin, call, given, way, f"name {number}", self.comm, self.mine)
        is_dense = call.operation in ("allreduce", "grouped_allreduce") and call.layout != "swapped"
        if way == "plan" and is_dense and given:
            outcome = self.plan_of(index)(given)
        elif way == "late, named" and call.operation != "broadcast_":
            self.late.append((case, start))
            return
        else:
            outcome = start()
        if isinstance(outcome, keras_dist.Handle):
            if self.mine.random() < 0.9:  # the others are dropped, but still run
                self.queued.append((case, outcome))
            return
        self.take(case, outcome)
        if isinstance(outcome, np.ndarray) and outcome.size and self.mine.random() < 0.1:
            outcome.reshape(-1)[self.mine.randrange(outcome.size)] = 1  # private to this rank
            self.held = [item for item in self.held if item[1][0] is not outcome]

    def plan_of(self, index):
        """Returns the plan of a call, which has memory of its own."""
        if index not in self.plans:
            call = self.program.calls[index]
            specs = [(rows[self.comm.rank], np.dtype(dtype)) for dtype, rows in call.arrays]
            compression = _engine.parse_compression(call.compression, "[here]")
            options = _engine.OpOptions(
                _engine.parse_op(call.op), None, *call.factors, compression=compression
            )
            plan = _engine.BucketOptions(self.program.bucket_nbytes, lend=True)
            names = [str(number) for number in range(len(specs))]
            self.plans[index] = _engine.FusedAllreduce(self.comm, names, specs, options, plan)
        return self.plans[index]

    def take(self, case, outcome):
        """Checks a result, and holds some."""
        what, given, before, wanted = case
        results = list(outcome) if isinstance(outcome, list | tuple) else [outcome]
        if [bits(each) for each in results] != wanted:
            self.wrong.append(f"{what}: received {results}")
        is_in_place = before is None or (given and results[0] is given[0])
        if not is_in_place and [bits(each) for each in given] != before:
            self.wrong.append(f"{what}: its argument has changed")
        if results and self.mine.random() < 0.6:
            self.held.append((what, results, wanted))

    def check_held(self):
        for what, results, wanted in self.held:
            if [bits(each) for each in results] != wanted:
                self.wrong.append(f"{what}: its result has changed later")

    def call_late(self):
        self.mine.shuffle(self.late)
        self.named += [(case, start()) for case, start in self.late]
        self.late.clear()

    def finish(self, handles):
        self.mine.shuffle(handles)
        for case, handle in handles:
            self.take(case, handle.wait())
        handles.clear()


def begin(call, given, way, name, comm, mine):
    """Calls an operation; returns its result, or its handle if it is queued."""
    is_list = call.operation.startswith("grouped") or call.operation == "broadcast_"
    arguments = [given] if is_list else list(given)
    options = {"process_set": comm}
    if "reduce" in call.operation:
        options["op"] = call.op
    if call.factors != (1, 1):
        options["prescale_factor"], options["postscale_factor"] = call.factors
    if call.compression != "none":
        options["compression"] = call.compression
    if call.operation.startswith("broadcast"):
        options["root_rank"] = call.root
    if call.splits is not None:
        options["splits"] = call.splits[comm.rank]
    if "named" in way:
        options["name"] = name
    if way == "out" and call.operation == "allreduce" and call.layout != "swapped":
        # Ranks may differ in where the result goes.
        options["out"] = mine.choice([None, given[0], np.empty_like(given[0])])
    if call.operation != "broadcast_":
        suffix = "_async" if way in ("queued", "late, named") else ""
        return getattr(keras_dist, call.operation + suffix)(*arguments, **options)
    keras_dist.broadcast_(*arguments, **options)
    return [array.astype(array.dtype.newbyteorder("=")) for array in given]
