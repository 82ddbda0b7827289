"""Point to point: two ranks compare their operations, then data moves, without the other ranks.

Both ranks find a difference, and neither sends what the other does not receive. A rank that has
come to a rendezvous of all ranks instead declines, see `decline`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from time import perf_counter_ns

import numpy as np

from keras_dist import errors
from keras_dist._engine.collectives.differences import mismatch
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.digests import HELLO, NAP_SECONDS, SPIN_SECONDS, Hello
from keras_dist._engine.mpi.library import failed_process
from keras_dist._engine.mpi.transfer import as_bytes, exchange_with, wait
from keras_dist._engine.shm.wait import PATIENCE_SECONDS, note, waiting
from keras_dist._engine.signature import CollectiveSignature, Entry, difference
from keras_dist._engine.tracing import spans

DATA = 2  # MPI tag

SEND, RECV = "send", "recv"
PARTNER = {SEND: "recv from", RECV: "send to"}
ALIKE = "Give both ranks the same name, shape and dtype."
IN_TURN = (
    "Call send and recv in the same order on the two ranks, and collectives before or after both."
)
ROUNDS = 20
TAG = 7


def send(
    comm: Communicator, array: np.ndarray, peer: int, name: str, key: str | None = None
) -> None:
    """Sends an array to another rank, which calls `recv`; blocks until it does."""
    if array.dtype.hasobject:
        expected, remedy = f"{name!r} to have a dtype of numbers", "Pass an array of numbers."
        raise errors.ArgumentTypeError(comm.where(), expected, str(array.dtype), remedy)
    call = CollectiveSignature(SEND, (Entry(name, array.shape, str(array.dtype)),), key=key)
    with _paired(comm, peer, "destination", call):
        _rendezvous(comm, peer, Hello(comm.rank, call, array.dtype))
        exchange_with(comm.world.Isend, as_bytes(array), peer, DATA)


def recv(
    comm: Communicator,
    peer: int,
    name: str,
    key: str | None = None,
    spec: tuple[tuple[int, ...], np.dtype] | None = None,
) -> np.ndarray:
    """Receives an array from another rank, which calls `send`; blocks until it does."""
    entries = () if spec is None else (Entry(name, spec[0], str(spec[1])),)
    call = CollectiveSignature(RECV, entries, key=key)
    with _paired(comm, peer, "source", call):
        sent = _rendezvous(comm, peer, Hello(comm.rank, call))
        array = np.empty(sent.call.entries[0].shape, sent.dtype)
        exchange_with(comm.world.Irecv, array.reshape(-1).view(np.uint8), peer, DATA)
    return array


@contextlib.contextmanager
def _paired(comm: Communicator, peer: int, role: str, call: CollectiveSignature) -> Iterator[None]:
    """Holds the lock while this rank exchanges data with another, and notes with which."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    if not isinstance(peer, int | np.integer) or peer not in others:
        expected = f"the {role} of {call} to be another rank of this job, 0 to {comm.size - 1}"
        remedy = "Ranks are numbered as in the job, also in a process set."
        raise errors.ArgumentError(comm.where(), expected, repr(peer), remedy)
    with comm.lock:
        note(sorted((comm.rank, int(peer))), call)
        try:
            yield
        except Exception as error:
            if failed_process(comm.mpi, error):
                raise _lost(comm, peer, call) from error
            raise


def _rendezvous(comm: Communicator, peer: int, mine: Hello) -> Hello:
    """Waits for the other rank; returns the greeting of the one that sends."""
    request = comm.world.isend(mine, peer, HELLO)
    with spans.rendezvous(mine.call), waiting:
        start = checked = time.perf_counter()
        while (message := comm.world.improbe(peer, HELLO)) is None:
            now = time.perf_counter()
            if now - start > SPIN_SECONDS:
                time.sleep(NAP_SECONDS)
            if now - checked > PATIENCE_SECONDS:
                checked = now
                if not comm.is_alive(peer):
                    raise _lost(comm, peer, mine.call)
        theirs = message.recv()
    wait(request)
    first, other = sorted((mine, theirs), key=lambda hello: (not hello.goes, hello.rank))
    if not other.goes or first.call.operation == other.call.operation:
        towards = f"{PARTNER[first.call.operation]} rank {first.rank}"
        expected = f"{towards}, which is in {first.call}"
        raise mismatch(comm, other.rank, expected, str(other.call), IN_TURN)
    sender, receiver = (first, other) if first.call.operation == SEND else (other, first)
    call = receiver.call
    as_sent = dataclasses.replace(call, operation=SEND, entries=call.entries or sender.call.entries)
    found = difference([sender.call, as_sent], [sender.rank, receiver.rank])
    if found is not None:
        raise mismatch(comm, *found, ALIKE)
    return sender


def _lost(comm: Communicator, peer: int, call: CollectiveSignature) -> errors.RankLostError:
    expected, received = f"rank {peer} to call {call}", "it, or another rank, has died"
    remedy = (
        "No other rank has the data of that rank: start the job again, which keras-dist run "
        "--max-restarts does by itself."
    )
    return errors.RankLostError(comm.where(), expected, received, remedy)


def clock_offset(comm: Communicator) -> tuple[int, int]:
    """Measures the clock of this rank minus that of rank 0, and the error, in ns. Collective."""
    # The answer with the shortest round trip counts; its error is half of that time. An offset
    # within the error is 0, as the processes of a node share their clock.
    with comm.lock:
        if comm.rank > 0:
            return min((_ask(comm) for _ in range(ROUNDS)), key=lambda found: found[1])
        buffer = np.empty(1, np.int64)
        for rank in range(1, comm.size):
            for _ in range(ROUNDS):
                comm.world.Recv(buffer, rank, TAG)
                comm.world.Send(np.array([perf_counter_ns()], np.int64), rank, TAG)
        return 0, 0


def _ask(comm: Communicator) -> tuple[int, int]:
    answer = np.empty(1, np.int64)
    asked = perf_counter_ns()
    comm.world.Send(answer, 0, TAG)
    comm.world.Recv(answer, 0, TAG)
    answered = perf_counter_ns()
    error = (answered - asked) // 2
    offset = asked + error - int(answer[0])
    return (0 if abs(offset) <= error else offset), error
