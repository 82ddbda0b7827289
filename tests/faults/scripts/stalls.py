"""Ranks that others wait for, in places of their own; see `meeting.py` for reductions."""

import ctypes
import os
import threading
import time
from unittest import mock

import numpy as np
from bare import runtime
from faults import LAUNCHED_AS, fault, run, send

from keras_dist import _engine, ops
from keras_dist._engine.faults.progress import count_update
from keras_dist._engine.shm import segments, wait
from keras_dist.ops import asynchronous


def begin() -> int:
    runtime.init()
    fault()
    return runtime.rank()


def sets_that_wait_for_each_other() -> None:
    rank = begin()
    low, high = runtime.add_process_set([0, 1]), runtime.add_process_set([1, 2])
    ops.barrier([low, high, None][rank])


def stop_while_memory_is_made() -> None:
    if begin() == 1:
        mock.patch.object(segments.Segment, "__init__", lambda *_: send("SIGSTOP")).start()
    ops.allreduce(np.ones(100_000))


def stop_when_others_are_at_the_end() -> None:
    rank = begin()
    ops.barrier()
    if rank == 0:
        send("SIGSTOP")


def be_slow_in_turn() -> None:
    rank = begin()
    for turn in range(10):
        time.sleep(0.5 * (turn % runtime.size() == rank))
        ops.allreduce(1.0, name="loss")


def work_while_others_are_at_the_end() -> None:
    def write_results() -> None:
        time.sleep(3)

    rank = begin()
    ops.barrier()
    if rank == 0:
        write_results()
        ctypes.PyDLL(None).usleep(7_000_000)
        print("written")


def be_stuck_at_the_end(stuck: str) -> None:
    rank = begin()
    ops.barrier()
    if rank == int(stuck):
        wait.note(runtime.communicator().ranks, "a transfer")
        with wait.blocked:
            time.sleep(30)


def names_that_never_meet() -> None:
    rank = begin()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    ops.allreduce(1.0, name=f"loss of {rank}")


def queue_and_shut_down() -> None:
    if begin() == 1:
        time.sleep(2.2)
    asynchronous.allreduce_async(1.0, name="loss").wait()
    runtime.shutdown()
    assert not [one for one in threading.enumerate() if one.name.startswith("keras_dist")]
    runtime.init()
    ops.barrier()


def settings_differ() -> None:
    fault()
    if LAUNCHED_AS == "1":
        os.environ["KERAS_DIST_STALL_SECONDS"] = "7"
    runtime.init()


def fork() -> None:
    begin()
    if os.fork() == 0:
        os._exit(threading.active_count() - 1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    ops.allreduce(1.0, name="loss")


def differ_in_training() -> None:
    rank, found = begin(), []

    def reduce() -> None:
        try:
            ops.allreduce([0.0] * (3 + rank))
        except RuntimeError as error:
            found.append(error)

    with _engine.progress.during("fit"):
        _engine.progress.begin_epoch(2)
        for _ in range(5 - rank):
            count_update()
        reduce()
    reduce()
    if rank == 1:
        print(*found, sep="\n")


run(globals())
