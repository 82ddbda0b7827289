"""The engine on threads that stand in for the ranks of many nodes, see `conformance`."""

import sys
import threading

import conformance
import ml_dtypes
import numpy as np
import pytest
from thread_ranks import Network, mpi_of

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist._engine.collectives import piggyback
from keras_dist._engine.shm import bucket_reduction

# The node of each rank.
TWO_TO_FOUR = "00 01 000 001 012 0000 0101 0111 0123"
MORE = "00112 01234 001122 0001221 0123456 01230123"
LAYOUTS = [[*map(int, nodes)] for nodes in f"{TWO_TO_FOUR} {MORE}".split()]
SEVERAL_NODES = [nodes for nodes in LAYOUTS if max(nodes) > 0]
# Small jobs take least time, and have as many ways.
CASES = [(nodes, n) for nodes in LAYOUTS for n in range(conformance.COUNT or 24 // len(nodes))]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Lets threads take turns often; no rank belongs to a job."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    monkeypatch.setattr(runtime, "where", lambda: "[here]")
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(("nodes", "number"), CASES, ids=str)
def test_results_are_those_of_numpy(monkeypatch, nodes, number):
    program = conformance.draw(number, len(nodes))
    conformance.prepare(monkeypatch, program.is_low, program.bucket_nbytes)
    network = Network(len(nodes), nodes)
    wrong = network.run(lambda rank: conformance.execute(program, mpi_of(rank)))
    assert wrong == [[]] * len(nodes)


# --- Differences and failures, with small arrays that use each method

COUNTS = [3, 300, 3000]  # float32: as a whole, in slices or halves, in pieces


def run(monkeypatch, nodes, work):
    """Calls a function with a communicator on each rank; returns what it returns."""
    conformance.prepare(monkeypatch, True, 25 * 2**20)

    def call(rank):
        comm = _engine.Communicator(mpi_of(rank))
        comm.halving_nbytes = 2**22
        found = work(comm)
        comm.free()
        return found

    return Network(len(nodes), nodes).run(call)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_a_difference_is_the_same_error_on_all_ranks_and_leaves_nothing(monkeypatch, nodes):
    def work(comm):
        texts, size = [], comm.size
        for count in COUNTS:
            mine, out = np.ones(count, np.float32), np.zeros(count, np.float32)
            others = [
                lambda: keras_dist.barrier(comm),
                lambda mine=mine: keras_dist.allreduce(mine, "max", process_set=comm),
                lambda mine=mine: keras_dist.allreduce(mine.astype("f8"), "sum", process_set=comm),
                lambda mine=mine: keras_dist.allreduce(mine[1:], "sum", process_set=comm),
                lambda mine=mine: keras_dist.allreduce(np.tile(mine, 9), "sum", process_set=comm),
            ]
            for odd in range(size):
                total = keras_dist.allreduce(mine, "sum", process_set=comm)  # then a short path
                assert (total == size).all()
                with pytest.raises(errors.MismatchError) as caught:
                    if comm.rank == odd:
                        others[odd % len(others)]()
                    else:
                        keras_dist.allreduce(mine, "sum", out=out, process_set=comm)
                texts.append(str(caught.value))
                assert (out == 0).all() and (mine == 1).all()
        return texts

    first, *others = run(monkeypatch, nodes, work)
    assert all(texts == first for texts in others)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_a_slice_that_one_rank_cannot_reduce_is_an_error_on_all_ranks(monkeypatch, nodes):
    failing, reduce_each = threading.local(), bucket_reduction.reduce_each

    def reduce_or_fail(*arguments):
        if getattr(failing, "now", False):
            raise MemoryError("on purpose")
        reduce_each(*arguments)

    def work(comm):
        for count in COUNTS[1:] if comm.node is not None else ():
            mine = np.ones(count, np.float32)
            for odd in [ranks[0] for ranks in comm.topology.nodes if len(ranks) > 1]:
                failing.now = comm.rank == odd
                with pytest.raises(errors.RankError, match="to reduce its slice"):
                    keras_dist.allreduce(mine, "sum", process_set=comm)
                failing.now = False
                assert (keras_dist.allreduce(mine, "sum", process_set=comm) == comm.size).all()

    with monkeypatch.context() as patched:
        patched.setattr(bucket_reduction, "reduce_each", reduce_or_fail)
        run(monkeypatch, nodes, work)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_numbers_travel_again_after_a_notice(monkeypatch, nodes):
    notices, heard = threading.local(), []
    monkeypatch.setattr(piggyback, "notice", lambda: getattr(notices, "mine", None))
    monkeypatch.setattr(piggyback, "deliver", lambda texts: heard.append(list(texts)))

    def work(comm):
        options = _engine.OpOptions(_engine.ReduceOp.SUM)
        plan = _engine.BucketOptions(2**20, counts_updates=True)
        for count in COUNTS:
            mine = np.ones(count, np.float32)
            fused = _engine.FusedAllreduce(comm, ["a"], [((count,), mine.dtype)], options, plan)
            for odd in range(-1, comm.size):
                notices.mine = "stop" if comm.rank == odd else None
                assert (fused([mine])[0] == comm.size).all()
                notices.mine = None

    run(monkeypatch, nodes, work)
    told = [texts for texts in heard if any(texts)]
    assert len(told) == len(nodes) ** 2 * len(COUNTS)
    assert all(texts.count("stop") == 1 for texts in told)


@pytest.mark.parametrize("nodes", SEVERAL_NODES, ids=str)
def test_below_the_crossover_a_rank_sends_few_messages(monkeypatch, nodes):
    # As a whole, by halves, and what is widened; float32 alone would be compressed.
    kinds = [("float32", "sum"), ("float32", "product"), ("complex64", "sum"), ("bool", "max")]
    kinds += [(dtype, "average") for dtype in ("float16", ml_dtypes.bfloat16, "uint8", "int64")]

    def work(comm):
        networks = [comm.world.network, comm.topology.across.network]
        places = comm.world.rank, comm.topology.across.rank
        # Two for each doubling of the number of nodes, and one for the first half of a slice.
        most = 2 * (len(comm.topology.nodes) - 1).bit_length()
        for dtype, op in kinds:
            is_wide = dtype in ("float16", ml_dtypes.bfloat16, "uint8", "int64")
            for count in (1, 20, 60) if is_wide else (1, 20, 1000):
                mine, sent = np.ones(count, dtype), []
                for _ in range(4):  # the ordinary way, with memory, and a short path
                    before = [n.messages[p] for n, p in zip(networks, places, strict=True)]
                    compression = "none" if dtype == "float32" else "fp16"
                    keras_dist.allreduce(mine, op, process_set=comm, compression=compression)
                    after = [n.messages[p] for n, p in zip(networks, places, strict=True)]
                    sent.append(sum(after) - sum(before))
                assert max(sent[2:]) <= most + (mine.nbytes > 20), (sent, dtype, count)
                assert bool(sent[-1]) == (comm.node is None or comm.topology.has_slice)

    run(monkeypatch, nodes, work)
