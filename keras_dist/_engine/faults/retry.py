"""Operations that are done again, without the ranks that have died meanwhile.

An operation begins with a meeting of all ranks. So none ends before all have come to it, and
of those that live some may have ended the last one while others have not, but never more. A
rank therefore keeps the outcome of its last operation until it has ended another. When a rank
has died, the others come together, whoever notices making all others come out of what they wait
in; they build their communicator anew and compare how many operations they have ended. Who is
one behind receives the outcome from one that is not; all others do theirs again, with what they
have brought. No rank has to go back.

What went through MPI is confirmed by all at the end: Open MPI 5 was seen to give out buffers in
which the data of a rank that had just died was missing, without an error. Shared memory needs no
such thing: the dead have written their part before they came to the meeting, or have not come.

Knows no MPI; `survivors` does.
"""

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from keras_dist import errors
from keras_dist._engine.collectives.ticket import Reordered
from keras_dist._engine.faults.ulfm import agree, is_loss, leave, rebuild

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator

__all__ = ["Retry", "retried", "retry"]

Operation = TypeVar("Operation", bound=Callable[..., Any])
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """How an operation has ended: by a value, or by an error that all ranks raise."""

    value: Any = None
    error: errors.KerasDistError | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@dataclasses.dataclass(frozen=True)
class _Place:
    """How far a rank is: how often all had joined, and how many operations it has ended since.

    A rank that has joined takes part in the operations of others without counting them.
    """

    joined: int = 0
    ended: int = 0

    def next(self, joins: bool) -> "_Place":
        return _Place(self.joined + 1) if joins else _Place(self.joined, self.ended + 1)


class Retry:
    """What a rank needs to go on when another has died.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: "Communicator"):
        self._comm = comm
        self._is_within = False
        self._place = _Place()
        self._last = _Outcome()

    def run(
        self,
        work: Callable[[], R],
        joins: bool = False,
        needs_no_mpi: Callable[[], bool] = lambda: False,
        lasting: Callable[[], Any] = lambda: None,
    ) -> R:
        """Runs an operation until it has ended among ranks that live.

        Collective, as the operation itself.

        Args:
            work: the operation. What it is given must stay as it is until it has ended.
            joins: whether it takes part, with nothing, in the operations of others.
            needs_no_mpi: tells, once it has ended, whether its data went through shared memory
                alone: then there is nothing to confirm.
            lasting: gives, once it has ended, what it returns in other memory, that stays as it is
                until the next has ended; `None` where there is none: then it is copied.

        Returns:
            What the operation returns.

        Raises:
            RankLostError: the ranks cannot go on.
        """
        with self._comm.lock:
            if self._is_within:
                return work()  # a part of another
            self._is_within = True
            try:
                outcome = self._run(work, joins, needs_no_mpi)
                self._place = self._place.next(joins)
                value = lasting()
                self._last = copy.deepcopy(outcome) if value is None else _Outcome(value)
            finally:
                self._is_within = False
        return cast(R, outcome.unwrap())

    def _run(
        self, work: Callable[[], Any], joins: bool, needs_no_mpi: Callable[[], bool]
    ) -> _Outcome:
        outcome = None
        while outcome is None:
            outcome = self._try(work)
            # While some have joined, each exchange is confirmed by itself.
            confirmed = self._comm.absence is not None or needs_no_mpi()
            if outcome is not None and confirmed:
                break
            if not agree(self._comm, outcome is not None):
                outcome = rebuild(self._comm, functools.partial(self._catch_up, joins))
        return outcome

    def _try(self, work: Callable[[], Any]) -> _Outcome | None:
        """Returns how an operation has ended; `None` where a rank has died."""
        try:
            return _Outcome(work())
        except Reordered:
            raise  # all ranks live: they have agreed on it
        except Exception as error:
            if is_loss(self._comm, error):
                leave(self._comm)
                return None
            if isinstance(error, errors.KerasDistError):
                return _Outcome(error=error)
            raise

    def _catch_up(self, joins: bool) -> _Outcome | None:
        """Returns the outcome of this operation from a rank that has ended it; or `None`."""
        comm = self._comm
        mine = pickle.dumps((self._place, joins))
        told = [pickle.loads(raw.tobytes()) for raw in comm.allgather_bytes(mine)]
        joined = max(place.joined for place, _ in told)
        behind = [rank for rank, (place, _) in enumerate(told) if place.joined < joined]
        if behind:  # they wait for others to join, who have seen all join
            holder = next(rank for rank, (place, _) in enumerate(told) if place.joined == joined)
        else:
            # Who has joined may have ended the last operation all the same, before it did so.
            newest = max(place.ended for place, _ in told)
            behind = [r for r, (place, out) in enumerate(told) if not out and place.ended < newest]
            holder = next(r for r, (place, _) in enumerate(told) if place.ended == newest)
        if not behind:
            return None
        parts = comm.allgather_bytes(pickle.dumps(self._last) if comm.rank == holder else b"")
        return pickle.loads(parts[holder].tobytes()) if comm.rank in behind else None


def retry(comm: "Communicator", work: Callable[[], R], **options: Any) -> R:
    """Runs an operation, again where a rank dies meanwhile; see `Retry.run` for options."""
    return work() if comm.recovery is None else comm.recovery.run(work, **options)


def retried(operation: Operation) -> Operation:
    """Makes an operation one that is done again where a rank dies and the others can go on."""

    @functools.wraps(operation)
    def run(comm: "Communicator", *args: Any, **kwargs: Any) -> Any:
        if comm.recovery is None:
            return operation(comm, *args, **kwargs)
        return comm.recovery.run(functools.partial(operation, comm, *args, **kwargs))

    return cast(Operation, run)
