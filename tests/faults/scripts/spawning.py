"""A script without a guard of `__main__` before `init`, which a spawned child runs again."""

import multiprocessing
import sys

from bare import runtime
from faults import fault

from keras_dist import ops

fault()
runtime.init()
if __name__ == "__main__":
    for way in "spawn", "forkserver":
        context = multiprocessing.get_context(way)
        child = context.Process(target=print)  # type: ignore[attr-defined]
        try:
            child.start()
            child.join()
            assert child.exitcode == 1
        except (EOFError, ConnectionError):  # the server of forks has ended
            pass
        ops.barrier()
        if way == "spawn" and runtime.rank() == 0:
            print("all have spawned", file=sys.stderr, flush=True)
        ops.barrier()
    print("fine", flush=True)
