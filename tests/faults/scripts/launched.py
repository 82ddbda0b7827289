"""Programs for the launcher: they end with a code, or wait until they are told to end."""

import os
import signal
import time

from bare import runtime
from faults import fault, run

from keras_dist import ops


def end(code: str) -> None:
    raise SystemExit(int(code))


def end_after_init(code: str) -> None:
    runtime.init()
    fault()
    end(code)


def wait(handling: str = "") -> None:
    if handling == "keeps SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    elif handling == "ignores SIGINT":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    runtime.init()
    ops.barrier()
    fault()
    print("ready", flush=True)
    if runtime.rank() == 0:
        time.sleep(100)
    ops.barrier()


run(globals())
