"""The start of every collective: all ranks come together and agree on what they do."""

import contextlib
import dataclasses
import pickle
import threading
from collections.abc import Iterator
from typing import Any

from keras_dist import errors
from keras_dist._engine.collectives.matching import by_name, find_by_name
from keras_dist._engine.collectives.piggyback import hear, notice
from keras_dist._engine.collectives.refusals import MeetAgain, settle_refused
from keras_dist._engine.collectives.signature import (
    JOINED,
    CollectiveSignature,
    JoinedRanks,
    difference,
)
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.progress import say_progress
from keras_dist._engine.faults.retry import retried
from keras_dist._engine.faults.ulfm import assure
from keras_dist._engine.shm.wait import note
from keras_dist._engine.tracing import spans

__all__ = ["rendezvous", "tell_difference", "tell_error", "telling", "times_met"]


SAME_STEPS = (
    "Every rank must make the same calls and the same number of steps: share the data out "
    "with keras_dist.data.shard, call keras_dist.join where data ends early, and let all ranks "
    "stop and leave alike."
)
UNDEFINED = (
    "Ranks that are out of data take part in allreduce and sparse_allreduce alone, and not in "
    "Adasum: call others when all ranks are out of data, or give all as many batches."
)
ELSEWHERE = "not in fit, evaluate or predict"

_of_thread = threading.local()


def rendezvous(comm: Communicator, call: CollectiveSignature, tells: bool = False) -> bool:
    """Waits for all ranks and checks that they are about to do the same.

    Collective: every rank of `comm`; blocks until all have come. Where some have joined, and
    the others mean the same, `comm.absence` says so: they go on without those.

    Args:
        comm: the ranks.
        call: what this rank is about to do.
        tells: whether ranks of the job tell each other their notices here: in updates alone, to
            which all of them come at the same place of their scripts.

    Returns:
        Whether a rank `holds` a result; the same on all.

    Raises:
        MismatchError: the calls differ; raised on every rank with the same text, and the
            ranks can go on with other operations.
    """
    if comm.size == 1:
        return False
    _of_thread.times = times_met() + 1
    note(comm.ranks, call)
    while True:
        with contextlib.suppress(MeetAgain):
            return _meet(comm, call, tells)


def _meet(comm: Communicator, call: CollectiveSignature, tells: bool) -> bool:
    if tells and notice() is not None and comm.job is comm:
        call = dataclasses.replace(call, notice=notice())
    if comm.refused:
        call = dataclasses.replace(call, refused=tuple(sorted(comm.refused)))
    with spans.meeting(call, comm.meetings + 1):
        same = comm.agree(call.digest)
    if not same:
        return tell_difference(comm, call)
    for name in call.refused:  # on all ranks alike
        comm.forget_refused(name)
    return call.holds


@contextlib.contextmanager
def telling(comm: Communicator, operation: str, key: str | None = None) -> Iterator[None]:
    """Raises on every rank what is wrong with the arguments of this one.

    It goes around the checks before a meeting. A rank that finds something wrong comes to the
    meeting all the same, to say so; or the others would wait, and be one operation behind.

    Args:
        comm: the ranks.
        operation: what the call is called in messages.
        key: the name under which the ranks would meet; `None` for none.
    """
    try:
        yield
    except Exception as error:  # what a user passes may raise anything when it is looked at
        told = (
            error if isinstance(error, errors.KerasDistError) else _foreign(comm, operation, error)
        )
        _tell(comm, CollectiveSignature(operation, key=key, error=told), key)
        raise


def tell_error(
    comm: Communicator, operation: str, error: Exception, key: str | None = None
) -> None:
    """Raises on every other rank what is wrong with the arguments of this one; see `telling`."""
    with contextlib.suppress(errors.KerasDistError), telling(comm, operation, key):
        raise error


def times_met() -> int:
    """Returns how often the calling thread has come to a meeting."""
    return getattr(_of_thread, "times", 0)


@by_name
@retried
def _tell(comm: Communicator, call: CollectiveSignature, key: str | None) -> None:
    with comm.lock:
        rendezvous(comm, call)


def _foreign(comm: Communicator, operation: str, error: Exception) -> errors.ArgumentError:
    expected = f"arguments of {operation} that can be read"
    remedy = "The traceback of that rank says where; tensors of a GPU go to the host first."
    received = f"{type(error).__name__}: {error}"
    return errors.ArgumentError(errors.explain(comm.where(), expected, received, remedy))


def tell_difference(comm: Communicator, call: CollectiveSignature) -> bool:
    """Finds out in what the calls of the ranks differ; notes it where some have but joined.

    Where they have but something to tell each other, that is handed on.

    Collective: every rank of `comm`, when the digests of their calls were not equal.

    Returns:
        Whether a rank `holds` a result.

    Raises:
        OtherFirst: they differ in their names, and all hold one of them.
        MeetAgain: this rank has refused an operation for which others had come.
        MismatchError: says which rank differs, and in what.
        KerasDistError: what is wrong with the arguments of a rank, see `telling`.
    """
    mine = pickle.dumps((call, say_progress(), comm.standing()))
    told = [pickle.loads(raw.tobytes()) for raw in comm.allgather_bytes(mine)]
    assure(comm)
    notices = [call.notice for call, _, _ in told]
    holds = any(call.holds for call, _, _ in told)
    standing = [standing for _, _, standing in told]
    settle_refused(comm, [call for call, _, _ in told], standing)
    asides: dict[str, Any] = {"holds": False, "notice": None, "refused": ()}
    calls = [dataclasses.replace(call, **asides) for call, _, _ in told]
    absence, comm.absence = comm.absence, None  # an error ends it on all ranks alike
    find_by_name(comm, calls, standing)
    wrong = [other.error for other in (call, *calls) if other.error is not None]
    if wrong:
        raise wrong[0]
    here = [place for place, other in enumerate(calls) if other.operation != JOINED]
    out = [place for place in range(comm.size) if place not in here]
    first = calls[here[0]]
    found = difference([calls[place] for place in here], [comm.ranks[place] for place in here])
    if found is not None:
        rank, expected, received = found
        other, place, _ = told[comm.ranks.index(rank)]
        remedy = first.remedy if other.operation == first.operation else SAME_STEPS
        expecting, its_place = comm.ranks[here[0]], told[here[0]][1]
        if place != its_place:
            places = f"Rank {expecting} is {its_place or ELSEWHERE}, rank {rank} "
            remedy = f"{places}{place or ELSEWHERE}. {remedy}"
        raise _mismatch(comm, rank, expected, received, remedy)
    hear(notices)
    if not out:
        return holds
    if not first.spares:
        ranks = ", ".join(str(comm.ranks[place]) for place in out)
        expected = f"reductions alone while ranks {ranks} are out of data and have joined"
        raise _mismatch(comm, comm.ranks[here[0]], expected, str(first), UNDEFINED)
    comm.absence = JoinedRanks(absence.first_out if absence else tuple(out), tuple(here))
    if comm.when_missed is not None and call.operation != JOINED:
        comm.when_missed()
    return holds


def _mismatch(
    comm: Communicator, rank: int, expected: str, received: str, remedy: str
) -> errors.MismatchError:
    where = f"[rank {rank} of {comm.job.size}]"
    comm.job.mismatch = errors.explain(where, expected, received, remedy)
    return errors.MismatchError(comm.job.mismatch)
