"""Retries: operations that the surviving ranks repeat after a rank has died, see decision 30.

All ranks confirm at the end what went through MPI. Shared memory needs no confirmation: a rank
writes its contribution before it comes to the rendezvous. With ULFM, a call that waits for a dead
rank fails on some rank, which revokes the communicator, so that the call fails on all. Every rank
must agree and shrink equally often, or two of these calls would match each other.
"""

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from keras_dist import errors
from keras_dist._engine.faults.progress import describe_progress
from keras_dist._engine.faults.rank_state import have
from keras_dist._engine.mpi.library import failed_process
from keras_dist._engine.mpi.topology import ranks_in
from keras_dist._engine.ordering.ticket import Reordered
from keras_dist._engine.shm.wait import also_blocked, blocked, note

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator

NEWS_SECONDS = 1.0  # MPI may report a death this much later
NAP_SECONDS = 1e-3

_log = logging.getLogger("keras_dist")
Operation = TypeVar("Operation", bound=Callable[..., Any])
R = TypeVar("R")


def is_loss(comm: "Communicator", error: BaseException) -> bool:
    """Returns whether an error comes from the death of a rank, as far as this rank can know."""
    if isinstance(error, errors.RankLostError) or failed_process(comm.mpi, error):
        return True
    # Received data may be invalid, and noticed before the death is reported.
    patience = 0.0 if isinstance(error, errors.KerasDistError) else NEWS_SECONDS
    end = time.perf_counter() + patience
    while not (known := sees_dead_ranks(comm.world)) and time.perf_counter() < end:
        time.sleep(NAP_SECONDS)
    return known


def agree(comm: "Communicator", fine: bool, world: Any = None) -> bool:
    """Returns whether all ranks are alive and have succeeded, on all that are. Collective."""
    world = comm.world if world is None else world
    try:
        with also_blocked():
            return bool(world.Agree(fine and not sees_dead_ranks(world)))
    except comm.mpi.Exception:
        return False


def check_alive(comm: "Communicator") -> None:
    """Checks that no rank has died, where the job continues without ranks that die. Collective."""
    if comm.faults.retry is not None and not agree(comm, True):
        raise errors.RankLostError("A rank has died.")


def leave(comm: "Communicator") -> None:
    """Releases all ranks that wait for this one."""
    if comm.node is not None:
        comm.node.leave()
    for world in comm.topology.mpi_communicators:
        world.Revoke()


def rebuild(comm: "Communicator", exchange: Callable[[], Any]) -> Any:
    """Rebuilds a communicator from the survivors, again if one dies. Collective; blocks."""
    if comm.subsets:
        raise errors.RankLostError(
            comm.where(),
            "no process sets where the job continues without a rank that has died",
            f"{comm.subsets} of them, and a rank that has died",
            "Start the job again, or do not use process sets.",
        )
    before = shrunk = comm.world
    found, complete = None, False
    note(comm.ranks, "the recovery from the death of a rank")
    while not complete:
        leave(comm)
        comm.disconnect()
        with blocked:
            shrunk = shrunk.Shrink()
        try:
            with blocked:
                alone = shrunk.Dup()
            comm.connect(alone)
            found, fine = exchange(), True
        except Exception as error:
            if not is_loss(comm, error):
                raise
            leave(comm)
            fine = False
        complete = agree(comm, fine, shrunk)
    indices = ranks_in(shrunk, before)
    gone = [rank for rank, index in enumerate(indices) if index == comm.mpi.UNDEFINED]
    comm.faults.losses += len(gone)
    comm.faults.changes += 1
    # Ranks may have counted differently when the rank died.
    comm.digests.count = comm.faults.changes << 32
    if comm.rank == 0:
        progress = describe_progress(comm.ranks)
        where = f" ({progress})" if progress else ""
        _log.warning(
            f"keras_dist: {have(gone)} died{where}. {comm.size} of {before.Get_size()} ranks "
            "continue, renumbered in their order."
        )
    return found


def sees_dead_ranks(world: Any) -> bool:
    """Returns whether a rank of a communicator has died, or another rank has noticed that."""
    dead = world.Get_failed()
    count = dead.Get_size()
    dead.Free()
    return bool(count) or world.Is_revoked()


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """The outcome of an operation: a value, or an error that all ranks raise."""

    value: Any = None
    error: errors.KerasDistError | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@dataclasses.dataclass(frozen=True)
class _Position:
    """The position of a rank: how often all ranks had joined, and its operations since then.

    A rank that has joined takes part in operations of others without counting them.
    """

    joined: int = 0
    ended: int = 0

    def next(self, joins: bool) -> "_Position":
        return _Position(self.joined + 1) if joins else _Position(self.joined, self.ended + 1)


class Retry:
    """Repeats operations of one communicator after a rank has died."""

    def __init__(self, comm: "Communicator"):
        self._comm = comm
        self._is_nested = False
        self._position = _Position()
        self._last = _Outcome()

    def run(
        self,
        work: Callable[[], R],
        joins: bool = False,
        needs_no_mpi: Callable[[], bool] = lambda: False,
        lasting: Callable[[], Any] = lambda: None,
    ) -> R:
        """Runs an operation, again if a rank dies, until it has ended on all alive. Collective."""
        with self._comm.lock:
            if self._is_nested:
                return work()  # part of another operation
            self._is_nested = True
            try:
                outcome = self._run(work, joins, needs_no_mpi)
                self._position = self._position.next(joins)
                value = lasting()
                self._last = copy.deepcopy(outcome) if value is None else _Outcome(value)
            finally:
                self._is_nested = False
        return cast(R, outcome.unwrap())

    def _run(
        self, work: Callable[[], Any], joins: bool, needs_no_mpi: Callable[[], bool]
    ) -> _Outcome:
        outcome = None
        while outcome is None:
            outcome = self._try(work)
            # While some ranks have joined, each exchange is confirmed separately.
            confirmed = self._comm.faults.joined is not None or needs_no_mpi()
            if outcome is not None and confirmed:
                break
            if not agree(self._comm, outcome is not None):
                outcome = rebuild(self._comm, functools.partial(self._outcome_of_others, joins))
        return outcome

    def _try(self, work: Callable[[], Any]) -> _Outcome | None:
        """Returns the outcome of an operation; `None` if a rank has died."""
        try:
            return _Outcome(work())
        except Reordered:
            raise  # all ranks are alive: they have agreed on it
        except Exception as error:
            if is_loss(self._comm, error):
                leave(self._comm)
                return None
            if isinstance(error, errors.KerasDistError):
                return _Outcome(error=error)
            raise

    def _outcome_of_others(self, joins: bool) -> _Outcome | None:
        """Returns the outcome of this operation from a rank that has ended it, or `None`."""
        comm = self._comm
        everyone = comm.allgather_objects((self._position, joins))
        joined = max(position.joined for position, _ in everyone)
        behind = [rank for rank, (position, _) in enumerate(everyone) if position.joined < joined]
        if behind:  # they wait for ranks to join that have seen all join
            holder = next(
                r for r, (position, _) in enumerate(everyone) if position.joined == joined
            )
        else:
            # A rank that has joined may have ended the last operation before.
            newest = max(position.ended for position, _ in everyone)
            behind = [
                rank
                for rank, (position, out) in enumerate(everyone)
                if not out and position.ended < newest
            ]
            holder = next(
                rank for rank, (position, _) in enumerate(everyone) if position.ended == newest
            )
        if not behind:
            return None
        outcomes = comm.allgather_objects(self._last if comm.rank == holder else None)
        return cast(_Outcome, outcomes[holder]) if comm.rank in behind else None


def retry(comm: "Communicator", work: Callable[[], R], **options: Any) -> R:
    """Runs an operation, again if a rank dies; see `Retry.run` for options."""
    return work() if comm.faults.retry is None else comm.faults.retry.run(work, **options)


def retried(operation: Operation) -> Operation:
    """Decorator: the operation is repeated if a rank dies and the others continue."""

    @functools.wraps(operation)
    def run(comm: "Communicator", *args: Any, **kwargs: Any) -> Any:
        if comm.faults.retry is None:
            return operation(comm, *args, **kwargs)
        return comm.faults.retry.run(functools.partial(operation, comm, *args, **kwargs))

    return cast(Operation, run)
