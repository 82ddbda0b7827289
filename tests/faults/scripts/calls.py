"""Two ranks make different calls, or a rank makes none any more."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from bare import runtime
from faults import die, expect, fault, run, tell

from keras_dist import _engine, errors, ops
from keras_dist.ops import asynchronous
from keras_dist.ops.send_recv import recv, send
from keras_dist.runtime import startup
from keras_dist.runtime.process_sets import ProcessSet

DIFFERENT: dict[str, Callable[[int], Any]] = {
    "another operation": lambda rank: ops.barrier() if rank else ops.allreduce(1.0),
    "another shape": lambda rank: ops.allreduce([0.0] * (3 + rank)),
    "another dtype": lambda rank: ops.allreduce(np.ones(3, ["f4", "f8"][rank])),
    "another name": lambda rank: ops.allreduce(1.0, name="norm" if rank else "loss"),
    "another root": lambda rank: ops.broadcast(1.0, root_rank=rank),
    "a root that is not there": lambda rank: ops.broadcast(1.0, root_rank=9),
    "a bad argument on one rank": lambda rank: ops.allreduce("text" if rank else 1.0),
}


def different() -> None:
    runtime.init()
    for case, call in DIFFERENT.items():
        try:
            call(runtime.rank())
        except (errors.KerasDistError, TypeError, ValueError) as error:
            tell(f"{case}: {error}")
    fault()
    DIFFERENT["another operation"](runtime.rank())


def tried(call: Callable[..., object], *arguments: Any, **options: Any) -> None:
    try:
        call(*arguments, **options)
    except errors.KerasDistError as error:
        tell(f"{runtime.rank()}: {error}")


def end_early(code: str) -> None:
    if runtime.rank() == 1:
        fault()
        raise SystemExit(int(code))
    ops.allreduce(1.0, name="loss")


def shut_down_alone() -> None:
    if runtime.rank() == 1:
        fault()
        runtime.shutdown()


def shut_down_after_an_error() -> None:
    runtime.init()
    try:
        if runtime.rank() == 1:
            fault()
            raise ValueError("broken on purpose")
        ops.allreduce(1.0, name="loss")
    finally:
        runtime.shutdown()


def end_while_named_ones_are_queued() -> None:
    runtime.init()
    if runtime.rank() == 1:
        time.sleep(0.5)  # until the other has queued both
        fault()
        return
    for handle in [asynchronous.allreduce_async(1.0, name=name) for name in ("loss", None)]:
        handle.wait()


def end_while_more_is_queued() -> None:
    asynchronous.allreduce_async(1.0)
    fault()
    if runtime.rank() == 0:
        asynchronous.allreduce_async(1.0, name="loss")


def end_while_a_set_is_used(how: str) -> None:
    first, last = ProcessSet([0, 1]), ProcessSet([1, 2])
    runtime.init(process_sets=[first, last])
    fault()
    if runtime.rank() == 1:
        ops.allreduce(1.0, process_set=last, name="loss")
    if how == "shutdown":
        runtime.shutdown()


def different_on_a_set() -> None:
    runtime.init()
    two = runtime.add_process_set([0, 1])
    if runtime.rank() == 2:
        time.sleep(60)
    fault()
    ops.allreduce([0.0] * (3 + runtime.rank()), process_set=two)


def twice_the_same_name() -> None:
    runtime.init()
    gate = threading.Event()
    if runtime.rank() == 1:
        runtime.communicator().order.queue(gate.wait, "what takes long")
    fault()
    first = asynchronous.allreduce_async(1.0, "sum", "loss")
    if runtime.rank() == 0:
        first.wait()
    tried(lambda: asynchronous.allreduce_async(2.0, "sum", "loss").wait())
    gate.set()
    found = float(first.wait()), float(ops.allreduce(3.0, "sum", "loss"))
    tell(f"{runtime.rank()}: {found}")


# --- Hosts


def unlike_hosts() -> None:
    from mpi4py import MPI

    fault()
    changes: list[dict[tuple[Any, str], Any]] = [
        {(np, "__version__"): "1.0"},
        {(startup, "__version__"): "0.1"},
        {(startup, "__version__"): "0.1", (startup, "ALIKE"): ("threads", *startup.ALIKE)},
        {(sys, "version_info"): SimpleNamespace(major=3, minor=9)},
        {(_engine.library, "version"): lambda mpi: "MPICH 1.0"},
    ]
    for change in changes:
        with contextlib.ExitStack() as stack:
            for (owner, name), value in change.items() if MPI.COMM_WORLD.rank == 1 else ():
                stack.enter_context(mock.patch.object(owner, name, value))
            tell(expect(errors.KerasDistError, runtime.init))
    now = time.time
    if MPI.COMM_WORLD.rank == 1:
        mock.patch.object(time, "time", lambda: now() + 300).start()
    runtime.init()
    tell(f"rank {runtime.rank()} has joined")


# --- Point to point


def different_messages() -> None:
    runtime.init()
    me, x = runtime.rank(), np.arange(6.0).reshape(2, 3)
    fault()
    if me == 0:
        send(x, 1)
        for name in (None, None, "a"):
            tried(send, x, 1, name=name)
    else:
        recv(0)
        tried(recv, 0, like=x.T)
        tried(recv, 0, like=x.astype("f4"))
        tried(recv, 0, like=x, name="b")
    tried(send, x, 1 - me)
    tried(recv, me)
    if me == 0:
        tried(recv, 1)
    ops.barrier()
    if me == 0:
        send(x, 1)
    else:
        assert (recv(0, like=x) == x).all()


def receive_from(end: str) -> None:
    """Rank 0 receives from rank 1, which "leaves" or "dies"."""
    runtime.init()
    if runtime.rank() == 2:
        ops.barrier()
    elif runtime.rank() == 0:
        recv(1)
    elif end == "dies":
        die()
    else:
        fault()


run(globals())
