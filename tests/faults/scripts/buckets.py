"""A fault while buckets of gradients are on their way and others are computed: buckets.py ACTION.

Two layers make four buckets. The action happens in the second step, before the third is queued.
"""

import sys
import time
from typing import Any
from unittest import mock

from faults import die, fault
from fits import build, rank, x, y

from keras_dist._engine import FusedAllreduce

action = sys.argv[1]
steps: list[int] = []
queue = FusedAllreduce.queue_bucket


def at_bucket(number: int) -> None:
    if rank != 1 or number != 2:
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


mock.patch.object(FusedAllreduce, "queue_bucket", queue_bucket).start()
width = 4 + rank if action == "train another model" else 4
build((width,)).fit(x[:16], y[:16], batch_size=4, verbose=0)
