"""Timelines of ranks that die or are on other nodes, and requests of a stranger."""

import os
import random
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from bare import runtime
from faults import LAUNCHED_AS, die, fault, run

from keras_dist import ops


def killed_at_any_moment() -> None:
    runtime.init()
    if runtime.rank() == 1:
        threading.Timer(random.uniform(0, 1.5), die).start()
    while True:
        ops.allreduce(np.ones(20_000), name="gradients")


def apart(where: str) -> None:
    """Ranks with different directories, as on nodes without a shared file system."""
    directory = Path(where, str(LAUNCHED_AS))
    (directory / "deep").mkdir(parents=True)
    os.chdir(directory)
    # Links that somebody has laid where a rank records, and where the root is to put what it gets.
    other = Path("other")
    other.write_text("mine")
    link = Path("deep/t.restart2.json.rank1.part")
    if directory.name == "1":
        link.symlink_to(other.absolute())
    runtime.init()
    if directory.name == "0":
        link.symlink_to(other.absolute())
    ops.allreduce(np.ones(1_000_000), name="by hand")
    fault()


def without_another() -> None:
    runtime.init()
    for step in range(20):
        if (runtime.rank(), step) == (1, 10) and runtime.size() == 3:
            die()
        ops.allreduce(np.ones(20_000), name="gradients")


def asked_by_a_stranger() -> None:
    runtime.init()
    if runtime.rank() == 0:
        fault()
        url = f"http://127.0.0.1:{os.environ['KERAS_DIST_PROMETHEUS_PORT']}/metrics"
        try:
            urllib.request.urlopen(url, timeout=60)
        except urllib.error.HTTPError as refused:
            print("refused:", refused.code, refused.read(), flush=True)


run(globals())
