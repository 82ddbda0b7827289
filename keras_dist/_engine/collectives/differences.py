"""What ranks do if the digests of a rendezvous differ: they go on, or raise the same error.

Whether an earlier operation has ended when a script calls another one of its name depends on
timing: it may have ended on one rank and not on another. So a rank that has refused an operation
says so at its next rendezvous. Ranks that wait there for the refused operation raise the error as
well, and this rank repeats its own rendezvous. If no rank waits for it, nothing happens.
"""

import dataclasses
import time
from collections.abc import Sequence

from keras_dist import errors
from keras_dist._engine.collectives import piggyback
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.progress import describe_progress
from keras_dist._engine.gradient_sets import COMPARISON, UnlikeGradients, difference_of_sets, union
from keras_dist._engine.nccl.ranks import abandon
from keras_dist._engine.ordering.queue import HeldNames
from keras_dist._engine.ordering.ticket import Reordered, in_flight
from keras_dist._engine.recovery import check_alive
from keras_dist._engine.shm.wait import LAST, waiting
from keras_dist._engine.signature import JOINED, CollectiveSignature, JoinedRanks, difference

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
ELSEWHERE = "not in fit, evaluate or predict"
LONGEST_NAP_SECONDS = 10e-3


class RepeatRendezvous(Exception):
    """This rank must repeat the rendezvous: others have left it with an error."""


def mismatch(
    comm: Communicator, rank: int, expected: str, received: str, remedy: str
) -> errors.MismatchError:
    """Returns the error, which the job keeps: later errors may follow from it."""
    where = f"[rank {rank} of {comm.job.size}]"
    comm.job.faults.mismatch = errors.explain(where, expected, received, remedy)
    return errors.MismatchError(comm.job.faults.mismatch)


@dataclasses.dataclass(frozen=True)
class _Arrival:
    """What a rank brings to the exchange after digests differed."""

    call: CollectiveSignature
    progress: str
    held: HeldNames


def resolve_difference(comm: Communicator, call: CollectiveSignature) -> None:
    """Settles why digests differ: all ranks raise, or continue if nothing matters. Collective."""
    mine = _Arrival(call, describe_progress(comm.ranks), comm.order.held_names())
    arrivals = comm.allgather_objects(mine)
    check_alive(comm)
    calls = [dataclasses.replace(each.call, notice=None, refused=()) for each in arrivals]
    is_ahead = any(other.ahead for other in calls)  # launched before the ranks have met
    try:
        _resolve(comm, call, calls, arrivals)
    except Exception as error:
        if is_ahead:
            abandon(comm, error)
        raise
    if is_ahead and any(other.digest != calls[0].digest for other in calls):
        abandon(comm, errors.RankError(f"{comm.where()} Ranks are out of data."))


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
    if comm.faults.joined and call.operation != JOINED:
        piggyback.tell(comm.faults.tell_missing)


def match_names(
    comm: Communicator, calls: Sequence[CollectiveSignature], held: Sequence[HeldNames]
) -> bool:
    """Lets the ranks agree on the operation to run first, within a rendezvous. Collective."""
    # Ranks that have joined take part in any operation, those in `fit` only in nameless ones.
    here = [
        index
        for index, call in enumerate(calls)
        if call.operation != JOINED or not call.takes_named
    ]
    keys = [(calls[index].key, held[index].names) for index in here]
    if len({key for key, _ in keys}) <= 1 or any(key not in names for key, names in keys):
        return False
    if any(calls[index].operation in LAST for index in here):
        found = _common([held[index] for index in here])  # that rank calls no more
    else:
        with waiting:
            found = _wait_for_common(comm, held, here)
    if not found:
        return True
    mine = calls[comm.rank]
    if mine.operation == JOINED or mine.key is found[0] is None:
        raise RepeatRendezvous
    raise Reordered(found[0])


def _wait_for_common(
    comm: Communicator, held: Sequence[HeldNames], here: Sequence[int]
) -> list[str | None]:
    """Returns the name of the operation to run first, in a list that is empty if there is none."""
    nap = 0.0
    while True:
        those = [held[index] for index in here]
        found = _common(those)
        if found or all(each.is_complete for each in those):
            return found
        time.sleep(nap)
        nap = min(LONGEST_NAP_SECONDS, 2 * nap + 1e-4)
        held = comm.world.allgather(comm.order.held_names())
        check_alive(comm)


def _common(held: Sequence[HeldNames]) -> list[str | None]:
    """Returns the first of the first rank's names that all ranks hold and may run; if any."""
    # The operation without a name comes first, else the name that rank 0 has held longest.
    common = set[str | None].intersection(*(set(each.names) for each in held))
    if None in common:
        return [None]
    all_give_way = all(each.gives_way for each in held)
    return [name for name in held[0].names if name in common and all_give_way][:1]


def resolve_refused(
    comm: Communicator, calls: Sequence[CollectiveSignature], held: Sequence[HeldNames]
) -> None:
    """Settles what some ranks have refused; returns if no rank waits for one. Collective."""
    names = [[name for name in each.names if name is not None] for each in held]
    for name in sorted({name for call in calls for name in call.refused}):
        others = [index for index, call in enumerate(calls) if name not in call.refused]
        waits = [name in names[index] and calls[index].key in names[index] for index in others]
        if not others or not all(waits):
            comm.order.forget_refused(name)
            continue
        called = all(calls[index].key == name for index in others)
        if comm.rank not in others:
            if called:
                comm.order.forget_refused(name)
            raise RepeatRendezvous
        if not called:
            raise Reordered(name)
        first = next(index for index in range(comm.size) if index not in others)
        raise in_flight(f"[rank {comm.ranks[first]} of {comm.job.size}]", name)


def settle_gradients(
    comm: Communicator,
    calls: list[CollectiveSignature],
    mine: CollectiveSignature,
    before: JoinedRanks | None,
) -> None:
    """Makes ranks that bring different gradients compare them first. Collective."""
    here = [index for index, call in enumerate(calls) if call.operation != JOINED]
    sets = [each for each in (calls[index].gradients for index in here) if each is not None]
    if len(sets) < len(here):
        return  # another operation
    ranks = [comm.ranks[index] for index in here]
    if (found := difference_of_sets(sets, ranks)) is not None:
        rank, expected, received, remedy = found
        raise mismatch(comm, rank, expected, received, remedy or calls[here[0]].remedy)
    forms, compares = union(sets), {calls[index].operation == COMPARISON for index in here}
    if len(compares) == 1 and all(each.forms == forms for each in sets):
        return
    comm.faults.joined = before
    if mine.gradients is not None:
        has_begun = bool(mine.bucket) and mine.gradients.adapts
        if mine.operation == COMPARISON or mine.gradients.forms != forms or has_begun:
            raise UnlikeGradients(forms)
    raise RepeatRendezvous  # others join in


def _check_equal(
    comm: Communicator, calls: list[CollectiveSignature], progress: list[str], all_wait: bool
) -> None:
    """Checks that ranks which have not joined call the same; if all wait, those in `fit` too."""
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
