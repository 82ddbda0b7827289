"""The rendezvous that starts every collective: all ranks meet and agree on the operation."""

import contextlib
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

from keras_dist import errors
from keras_dist._engine.collectives import piggyback
from keras_dist._engine.collectives.matching import by_name, match_names
from keras_dist._engine.collectives.mismatch import mismatch
from keras_dist._engine.collectives.refusals import RepeatRendezvous, resolve_refused
from keras_dist._engine.collectives.unlike_gradients import settle_gradients
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.progress import describe_progress
from keras_dist._engine.gradient_sets import UnlikeGradients
from keras_dist._engine.messages import as_message
from keras_dist._engine.mpi.peers import Payload
from keras_dist._engine.nccl.lifetime import abandon, undoing
from keras_dist._engine.ordering.queue import HeldNames
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.recovery.ulfm import check_alive
from keras_dist._engine.shm.wait import note
from keras_dist._engine.signature import JOINED, CollectiveSignature, JoinedRanks, difference
from keras_dist._engine.tracing import spans

SAME_STEPS = (
    "Every rank must make the same calls and the same number of steps: share the data out "
    "with keras_dist.data.shard, call keras_dist.join where data ends early, and let all ranks "
    "stop and leave alike. An exception that the script catches is raised on all ranks by "
    "keras_dist.raise_on_all."
)
UNDEFINED = (
    "Ranks that are out of data take part in allreduce and sparse_allreduce alone, and not in "
    "Adasum: call others when all ranks are out of data, or give all as many batches."
)
PAYLOAD_ALONE = b"payload follows."  # 16 bytes, as a digest
ELSEWHERE = "not in fit, evaluate or predict"


class _OfThread(threading.local):
    """How often the thread has started a rendezvous."""

    count = 0


_of_thread = _OfThread()


def rendezvous(
    comm: Communicator,
    call: CollectiveSignature,
    notices: bool = False,
    payload: Payload | None = None,
) -> bool:
    """Waits for all ranks and checks that they call the same operation.

    Collective: every rank of `comm`; blocks. If some ranks have joined and the others agree,
    `comm.faults.joined` is set, and the operation runs without the ranks that have joined.
    """
    if comm.size == 1:
        return False
    _of_thread.count += 1
    note(comm.ranks, call)
    while True:
        with contextlib.suppress(RepeatRendezvous):
            return _rendezvous(comm, call, notices, payload)


def _rendezvous(
    comm: Communicator, call: CollectiveSignature, notices: bool, payload: Payload | None
) -> bool:
    if notices and piggyback.notice() is not None and comm.job is comm:
        call = dataclasses.replace(call, notice=piggyback.notice())
    if comm.order.refused:
        call = dataclasses.replace(call, refused=tuple(sorted(comm.order.refused)))
    launched = 0 if comm.nccl is None else comm.nccl.launched
    if launched != call.launched:
        call = dataclasses.replace(call, launched=launched, ahead=False)
    with spans.rendezvous(call, comm.digests.count + 1):
        same = comm.digests.compare(call.digest, payload)
    holds = call.holds if same else resolve_difference(comm, _with_failure(comm, call, payload))
    if comm.nccl is not None:
        comm.nccl.agree()
    if same:
        for name in call.refused:  # the same on all ranks
            comm.order.forget_refused(name)
    return holds


def repeated_rendezvous(
    comm: Communicator, call: CollectiveSignature
) -> Callable[[Payload | None], bool]:
    """Returns a short form of `rendezvous` for a call that is repeated.

    The caller holds the lock, brings no notice and has refused no name. The function takes the
    payload, and returns whether all ranks brought the same digest; otherwise they have agreed to
    continue, as after `rendezvous`.
    """
    ranks, digests, digest = comm.ranks, comm.digests, call.digest
    on_node = digests.on_node

    def again(payload: Payload | None) -> bool:
        _of_thread.count += 1
        note(ranks, call)
        if on_node is None:
            same = digests.compare(digest, payload)
        else:
            digests.count += 1
            same = on_node(digest)
        if not same:
            try:
                resolve_difference(comm, _with_failure(comm, call, payload))
            except RepeatRendezvous:
                rendezvous(comm, call, payload=payload)
        return same

    return again


def rendezvous_for_payload(comm: Communicator, call: CollectiveSignature, payload: Payload) -> None:
    """Lets a payload travel after a rendezvous in which the ranks differed, but agreed to continue.

    Collective: every rank of `comm`; blocks.
    """
    if not comm.digests.compare(PAYLOAD_ALONE, payload):
        resolve_difference(comm, _with_failure(comm, call, payload))


def slice_error(comm: Communicator, received: str) -> errors.RankError:
    """Returns the error of a slice that a rank could not reduce."""
    expected = "every rank to reduce its slice of a bucket"
    remedy = "See the traceback of the rank that failed."
    return errors.RankError(errors.explain(comm.where(), expected, received, remedy))


def _with_failure(
    comm: Communicator, call: CollectiveSignature, payload: Payload | None
) -> CollectiveSignature:
    """Returns what this rank brings after digests differed: also its error, if it has failed."""
    if payload is None or payload.failure is None:
        return call
    failure, payload.failure = payload.failure, None
    error = slice_error(comm, repr(failure))
    error.__cause__ = failure
    return dataclasses.replace(call, error=error)


def rendezvous_count() -> int:
    """Returns how often the calling thread has started a rendezvous."""
    return _of_thread.count


class raise_on_all:  # a class, since a generator takes three times as long
    """Context manager that raises an error in the arguments of this rank on every rank.

    Wraps the checks before a rendezvous. A rank whose check fails comes to the rendezvous to report
    the error; otherwise the others would wait for it, and be one operation behind.
    """

    __slots__ = ("_comm", "_key", "_operation")

    def __init__(self, comm: Communicator, operation: str, key: str | None = None):
        self._comm, self._operation, self._key = comm, operation, key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, *trace: Any) -> None:
        if isinstance(error, Exception):  # reading a user's value may raise anything
            known = isinstance(error, errors.KerasDistError)
            reported = error if known else _unreadable(self._comm, self._operation, error)
            call = CollectiveSignature(self._operation, key=self._key, error=reported)
            _report(self._comm, call, self._key)


def report_error(
    comm: Communicator, operation: str, error: Exception, key: str | None = None
) -> None:
    """Raises an error in the arguments of this rank on every other rank; see `raise_on_all`."""
    with contextlib.suppress(errors.KerasDistError), raise_on_all(comm, operation, key):
        raise error


@by_name
@retried
def _report(comm: Communicator, call: CollectiveSignature, key: str | None) -> None:
    with comm.lock:
        rendezvous(comm, call)


def _unreadable(comm: Communicator, operation: str, error: Exception) -> errors.ArgumentError:
    expected = f"arguments of {operation} that can be read"
    remedy = "See the traceback of that rank; copy tensors of a GPU to the host first."
    received = f"{type(error).__name__}: {error}"
    return errors.ArgumentError(comm.where(), expected, received, remedy)


@dataclasses.dataclass(frozen=True)
class _Arrival:
    """What a rank brings to the exchange after digests differed."""

    call: CollectiveSignature
    progress: str
    held: HeldNames


def resolve_difference(comm: Communicator, call: CollectiveSignature) -> bool:
    """Finds out why the digests of the ranks differ.

    Collective: every rank of `comm`, after digests that were not equal. Ranks that differ in
    nothing but notices, held results or ranks that have joined continue.
    """
    mine = as_message(_Arrival(call, describe_progress(), comm.order.held_names()))
    arrivals = [pickle.loads(raw.tobytes()) for raw in comm.allgather_bytes(mine)]
    check_alive(comm)
    plain: dict[str, Any] = {"holds": False, "notice": None, "refused": ()}
    calls = [dataclasses.replace(arrival.call, **plain) for arrival in arrivals]
    with undoing(comm, calls):
        _resolve(comm, call, calls, arrivals)
    return any(arrival.call.holds for arrival in arrivals)


def _resolve(
    comm: Communicator,
    call: CollectiveSignature,
    calls: list[CollectiveSignature],
    arrivals: list[_Arrival],
) -> None:
    held = [arrival.held for arrival in arrivals]
    resolve_refused(comm, [arrival.call for arrival in arrivals], held)
    all_wait = match_names(comm, calls, held)
    before, comm.faults.joined = comm.faults.joined, None  # an error ends it on all ranks
    try:
        failed = [other.error for other in (call, *calls) if other.error is not None]
        if failed:
            raise failed[0]
        settle_gradients(comm, calls, call, before)
        _check_equal(comm, calls, [arrival.progress for arrival in arrivals], all_wait)
        joined = _joined_ranks(comm, calls, before)
    except (errors.KerasDistError, UnlikeGradients, RepeatRendezvous) as error:
        if any(other.launched for other in calls):
            abandon(comm, error)
        awaited = all_wait or any(each.is_awaited for each in held)
        if awaited and isinstance(error, errors.KerasDistError):
            error.is_shared = True
            comm.order.end_waits(error, of_all=all_wait)
        raise
    piggyback.deliver([arrival.call.notice for arrival in arrivals])
    comm.faults.joined = joined
    if comm.faults.joined and comm.faults.on_missing and call.operation != JOINED:
        comm.faults.on_missing()


def _check_equal(
    comm: Communicator, calls: list[CollectiveSignature], progress: list[str], all_wait: bool
) -> None:
    """Checks that the ranks which have not joined call the same operation.

    If all wait, ranks that do not take part in the operations of others have to call it too.
    """
    here = [
        index
        for index, other in enumerate(calls)
        if other.operation != JOINED or (all_wait and not other.takes_named)
    ]
    first = calls[here[0]]
    found = difference([calls[index] for index in here], [comm.ranks[index] for index in here])
    if found is None:
        return
    rank, expected, received = found
    index = comm.ranks.index(rank)
    remedy = first.remedy if calls[index].operation == first.operation else SAME_STEPS
    mine, other = progress[here[0]] or ELSEWHERE, progress[index] or ELSEWHERE
    if mine != other:
        remedy = f"Rank {comm.ranks[here[0]]} is {mine}, rank {rank} {other}. {remedy}"
    raise mismatch(comm, rank, expected, received, remedy)


def _joined_ranks(
    comm: Communicator, calls: list[CollectiveSignature], before: JoinedRanks | None
) -> JoinedRanks | None:
    """Returns which ranks have joined; checks that the operation is defined without them."""
    here = tuple(index for index, other in enumerate(calls) if other.operation != JOINED)
    joined = tuple(index for index in range(comm.size) if index not in here)
    if not joined:
        return None
    first = calls[here[0]]
    if not first.spares:
        ranks = ", ".join(str(comm.ranks[index]) for index in joined)
        expected = f"reductions alone while ranks {ranks} are out of data and have joined"
        raise mismatch(comm, comm.ranks[here[0]], expected, str(first), UNDEFINED)
    return JoinedRanks(before.first_out if before else joined, here)
