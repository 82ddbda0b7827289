"""Ranks that go on after others have died."""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from bare import runtime
from faults import break_down, die, expect, fault, run

from keras_dist import _engine, errors, ops
from keras_dist._engine.mpi.digests import DigestExchange
from keras_dist._engine.shm import segments, wait

runtime.init()
me = runtime.rank()


def planned(names: str, count: int, dtype: str, *, postscale: float = 1.0, **plan: Any) -> Any:
    """Returns a planned sum of arrays of `count` elements."""
    specs = [((count,), np.dtype(dtype))] * len(names)
    options = _engine.OpOptions(_engine.ReduceOp.SUM, postscale=postscale)
    settings = _engine.BucketOptions(**plan)
    return _engine.FusedAllreduce(runtime.communicator(), [*names], specs, options, settings)


def at_two_steps() -> None:
    """Each rank contributes a power of two, so a sum shows which ranks contributed."""
    kills, sums = {1: 4, 2: 9}, []
    for step in range(14):
        if kills.get(me) == step:
            die()
        total = ops.allreduce(np.full(50_000, 2.0**me), op="sum", name="gradients")
        assert (total == total[0]).all()
        sums.append(int(total[0]))
        if step == 11:
            ops.join()
    assert len(set(map(tuple, ops.allgather_object(sums)))) == 1
    assert ops.broadcast([me], root_rank=0).tolist() == [0]
    if runtime.rank() == 0:
        print("sums", sums)


def while_another_keeps_results() -> None:
    """One rank keeps results until it holds all rows of shared memory but one, and they are copied.

    Another dies at a rendezvous from step 3 on; then the next one does at a later rendezvous.
    """
    for last, moment in (5, 0), (4, 2), (3, 5):
        keep_results(last, moment)


def keep_results(last: int, moment: int) -> None:
    reduce, met = planned("ab", 50_000, "f4", bucket_nbytes=1, lend=True), DigestExchange.compare
    meetings: list[Any] = []
    kept: list[Any] = []

    def compare(self: Any, digest: Any, payload: Any = None) -> Any:
        if len(meetings) == moment:
            die()
        meetings.append(digest)
        return met(self, digest, payload)

    sums = [(size, 2**size - 1) for size in (last + 1, last)]
    for step in range(9):
        if me == last and step == 3:
            mock.patch.object(DigestExchange, "compare", compare).start()
        results = reduce([np.full(50_000, step + 2.0**me, np.float32)] * 2)
        for result in results:
            assert (result == result[0]).all()
            assert result[0] in [size * step + ranks for size, ranks in sums], (last, step)
        if me == 1 and step:
            kept.append((results[0], results[0].copy()))
        del results, result
    for result, before in kept:
        assert (result == before).all()
    assert runtime.communicator().size == last


def nobody() -> None:
    """No rank dies, but results are written, and an argument is wrong."""
    for factor in (1.0, 0.5):
        reduce = planned("a", 50_000, "f4", postscale=factor, bucket_nbytes=1, lend=True)
        for step in range(7):
            [result] = reduce([np.full(50_000, step, np.float32)])
            result[:] = -1
            [kept] = runtime.communicator().faults.retry._last.unwrap()
            assert (kept == 2 * step * factor).all()
    for name in (None, "loss"):
        wrong = "median" if me == 0 else "sum"
        expect(errors.ArgumentError, ops.allreduce, 1.0, wrong, name)
        assert ops.allreduce(1.0, "sum") == 2


def while_another_has_joined() -> None:
    if me != 1:
        for step in range(3):
            if me == 2 and step == 1:
                die()
            total = ops.allreduce(2.0**me, op="sum")
            assert total == [9 + 4, 9, 9][step], total
    ops.join()
    assert ops.allreduce(2.0**me, op="sum") == 11
    at_the_end()


def when_it_has_been_waited_for() -> None:
    reduce = planned("g", 1000, "f8", bucket_nbytes=2**20, counts_updates=True)
    mine, come = [np.full(1000, 2.0**me)], wait.Counter.raise_to

    def come_and_die(*arguments: Any) -> None:
        come(*arguments)
        die()

    for _ in range(3):
        reduce(mine)
    ops.barrier()
    if me == 3:
        mock.patch.object(wait.Counter, "raise_to", come_and_die).start()
    if me in (0, 2):
        time.sleep(1.5)
    [total] = reduce(mine)
    ops.join()
    assert (total == 15).all(), total


def while_memory_is_made_and_in_a_broadcast() -> None:
    if me == 1:
        mock.patch.object(segments.Segment, "__init__", lambda *_: die()).start()
    total = ops.allreduce(np.full(100_000, 2.0**me), op="sum")
    assert (total == 13).all()
    assert not [*Path("/dev/shm").glob(f"keras_dist-{os.getuid()}-{os.getpid()}-*")]
    if me == 0:
        die()
    assert ops.broadcast_object(f"from {me}") == "from 2"
    assert (runtime.rank(), runtime.size()) == (me - 2, 2)


def at_the_end() -> None:
    if me == 1:
        time.sleep(1)
        die()


def without_support() -> None:
    at_the_end()
    ops.barrier()


def with_process_sets() -> None:
    runtime.add_process_set([0, 1])
    if me == 2:
        die()
    ops.barrier()


def one_rank_is_ready(ready: str) -> None:
    fault()
    if me == int(ready):
        runtime.survive_rank_loss()
    ops.allgather_object(me)


def another_does_not_come() -> None:
    ops.barrier()
    if me == 1:
        die()
    if me == 2:
        time.sleep(1000)
    ops.barrier()


def one_raises() -> None:
    if me == 1:
        break_down()
    ops.barrier()


def watched_root() -> None:
    from keras_dist.monitor import sockets

    def watch() -> Any:
        found: list[Any] = []
        for path in sockets.find_sockets():
            try:
                jobs = sockets.jobs_of(path)  # the first may be without the answers of slow ranks
                found.append(next(j for j in jobs if all(row.age is not None for row in j.rows)))
            except (OSError, StopIteration):  # of the dead, or of another job's end
                pass
        [job] = [job for job in found if job.pid == int(pids[0])]
        assert [row.pid for row in job.rows] == pids
        return job

    pids = ops.allgather_object(os.getpid())
    if me == 0:
        watch()
        die()
    pids = ops.allgather_object(os.getpid())
    if me == 1:
        assert all(row.age < 3 for row in watch().rows)
    ops.barrier()


run(globals())
