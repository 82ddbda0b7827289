"""A fault while buckets of gradients are on their way and others are computed: buckets.py ACTION.

Two layers make four buckets. The action happens in the second step, before the third is queued.
"""

import os
import sys
import time
from typing import Any
from unittest import mock

import numpy as np
from faults import die, fault

from keras_dist import _engine, runtime

action = sys.argv[1]
steps: list[int] = []
queue = _engine.FusedAllreduce.queue_bucket


def at_bucket(number: int) -> None:
    if runtime.rank() != 1 or number != 2:
        return
    if action == "die":
        die()
    fault()
    if action == "raise":
        raise MemoryError("broken on purpose")
    if action == "stay away":
        time.sleep(1000)


def queue_bucket(self: Any, number: int, *arguments: Any) -> Any:
    if action == "train another model" and not steps:
        fault()  # here, so that its time does not depend on that of the compilation
    steps.extend([number] * (number == 0))
    if len(steps) == 2:
        at_bucket(number)
    return queue(self, number, *arguments)


mock.patch.object(_engine.FusedAllreduce, "queue_bucket", queue_bucket).start()
if "KERAS_BACKEND" in os.environ:
    from fits import build, x, y

    width = 4 + runtime.rank() if action == "train another model" else 4
    build((width,)).fit(x[:16], y[:16], batch_size=4, verbose=0)
else:
    import bare  # noqa: F401

    runtime.init()
    how = _engine.BucketOptions(1, operation="the reduction of gradients", overlaps=True)
    options, specs = _engine.OpOptions(_engine.ReduceOp.SUM), [((50,), np.dtype("f4"))] * 4
    plan = _engine.FusedAllreduce(runtime.communicator(), "abcd", specs, options, how)
    for _ in range(2):
        handles = [plan.queue_bucket(number, [np.ones(50, "f4")]) for number in range(4)]
        for handle in handles:
            handle.wait()
