"""Forks, threads, and the end of the interpreter."""

import atexit
import multiprocessing
import os
import sys
import threading
import time
from typing import Any

import numpy as np
from faults import fault, run


def early() -> None:
    print("early", ops.allreduce(1.0, op="sum"))


if sys.argv[1] == "handlers_at_exit":
    atexit.register(early)
    exec(sys.argv[2])

from bare import runtime  # noqa: E402

from keras_dist import errors, ops  # noqa: E402


def fine() -> None:
    print("fine", flush=True)


def use(queue: Any) -> None:
    try:
        queue.put(str(runtime.rank()))
    except errors.LaunchError as error:
        queue.put(str(error))


def forked() -> None:
    runtime.init()
    ops.barrier()
    fault()
    # os.fork: a child that uses us, one that raises, one that leaves, one that ends like a rank.
    for code, act in [(1, "runtime.rank()"), (1, "1 / 0"), (3, "raise SystemExit(3)"), (0, "pass")]:
        if (pid := os.fork()) == 0:
            exec(act)
            raise SystemExit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, act
    # multiprocessing, as a DataLoader has it.
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=use, args=(queue,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        assert "before the end of its script. Received: process" in queue.get()
        worker.join()
        assert worker.exitcode == 0
    assert ops.allreduce(1.0, op="sum") == runtime.size()
    fine()


def call_in_threads() -> None:
    wrong = []

    def work() -> None:
        for _ in range(100):
            total = ops.allreduce(np.full(1000, 1.0 + runtime.rank()), op="sum")
            if (total != 3).any():
                wrong.append(total)

    all_threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()
    assert not wrong


def first_use_by_threads() -> None:
    fault()
    call_in_threads()
    fine()


def init_and_shutdown(last: str) -> None:
    fault()
    for _ in range(3):
        runtime.init()
        runtime.init()
        call_in_threads()
        runtime.shutdown()
        runtime.shutdown()
    getattr(runtime, last)()
    fine()


def handlers_at_exit(loads: str) -> None:
    runtime.init()
    atexit.register(lambda: print(f"late {ops.allreduce(1.0, op='sum')}\n", end="", flush=True))
    fault()
    fine()


def without_modules() -> None:
    def raise_error() -> None:
        raise ValueError("broken on purpose")

    runtime.init()
    atexit.register(raise_error)
    for name in [name for name in sys.modules if name.startswith("keras_dist")]:
        del sys.modules[name]
    fault()
    fine()


def waiting() -> None:
    """Rank 0 measures what it uses of its core while it waits."""
    runtime.init()
    began = time.process_time()
    if runtime.rank() == 1:
        fault()
        time.sleep(2)
    ops.barrier()
    middle = time.process_time()
    assert middle - began < 0.6, middle - began
    if runtime.rank() == 1:
        time.sleep(2)
        return

    def check() -> None:
        used = time.process_time() - middle
        print("fine" if used < 0.6 else used, flush=True)

    from keras_dist.runtime import exit_hooks

    atexit._clear()
    atexit.register(check)
    atexit.register(exit_hooks._finalize, os.getpid())


if __name__ == "__main__":
    run(globals())
