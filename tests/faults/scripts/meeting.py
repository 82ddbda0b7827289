"""Ranks reduce, and some of them do something else before a turn.

meeting.py [--turns N] [--size N] [--early] [--forever] [RANK:ACTION ...]
"""

import argparse
import ctypes
import itertools
import os
import pathlib
import resource
import signal
import time

import numpy as np
from bare import runtime
from faults import LAUNCHED_AS, fault, send

from keras_dist import ops


def stay_away() -> None:
    time.sleep(1000)


def load_data() -> None:
    ctypes.CDLL(None).usleep(3_400_000)


def hold_lock(microseconds: str) -> None:
    """A call that holds the interpreter lock."""
    ctypes.PyDLL(None).usleep(int(microseconds))


def fail() -> None:
    raise ValueError("broken on purpose")


def fail_although_abort_returns() -> None:
    from mpi4py import MPI

    class Returning(MPI.Intracomm):
        def Abort(self, errorcode: int = 0) -> None:  # type: ignore[override]
            pass

    MPI.COMM_WORLD = Returning(MPI.COMM_WORLD)  # type: ignore[misc]
    fail()


def run_out_of_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
    bytearray(2**33)


def crash() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def leave() -> None:
    os._exit(0)


def tell_mpiexec(name: str) -> None:
    pid, names = os.getppid(), ("mpiexec", "mpiexec.hydra", "prterun")
    while pathlib.Path(f"/proc/{pid}/comm").read_text().strip() not in names:
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, getattr(signal, name))


def train() -> None:
    ops.allreduce(np.ones(options.size), name="loss")


def act(rank: object) -> None:
    for who, _, what in (each.partition(":") for each in options.actions):
        if who in (str(rank), "all"):
            fault()
            name, *arguments = what.split()
            send(name) if name.startswith("SIG") else globals()[name](*arguments)


parser = argparse.ArgumentParser()
parser.add_argument("actions", nargs="*")
parser.add_argument("--turns", type=int, default=0)
parser.add_argument("--size", type=int, default=1)
parser.add_argument("--early", action="store_true", help="act before init")
parser.add_argument("--forever", action="store_true")
options = parser.parse_args()
if options.early:
    act(LAUNCHED_AS)
runtime.init()
for turn in itertools.count():
    if turn == options.turns and not options.early:
        act(runtime.rank())
    if turn > options.turns:
        if not options.forever:
            break
        time.sleep(0.01)
    train()
