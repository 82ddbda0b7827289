"""The process sets of a job: which there are, how the ranks agree on them, how they come to life.

The ids and ranks of all sets are the same on every rank; the communicator of a set is with its
members alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

from keras_dist import _engine, errors
from keras_dist.runtime.process_sets import (
    ProcessSet,
    Ranks,
    check_set,
    global_process_set,
    say_ranks,
)

__all__ = ["SetTable"]

GLOBAL = 0  # the id of the set of all ranks
SAME_SETS = "Pass the same process sets, in the same order, on every rank."


class SetTable:
    """The sets of a job: the same ids and ranks on every rank.

    Args:
        job: the communicator of all ranks.
        mpi_comm: the user's communicator that it was made from, if there was one.
    """

    def __init__(self, job: _engine.Communicator, mpi_comm: Any | None):
        self.job = job
        self._ranks: dict[int, Ranks] = {GLOBAL: tuple(job.ranks)}  # by id
        self._known: list[ProcessSet] = []  # those that this rank has objects of
        global_process_set._bind(GLOBAL, job.ranks, job, job, (GLOBAL,))
        global_process_set.mpi_comm = mpi_comm

    def communicator(self, process_set: Any) -> _engine.Communicator:
        """Returns the communicator of a set.

        Raises:
            ArgumentTypeError: it is no `ProcessSet`.
            ArgumentError: this rank is not in it, or the set has no id.
        """
        return check_set(process_set, self.job.where())._among(self.job)

    def includes_me(self, process_set: Any) -> bool:
        """Tells whether this rank is in a set.

        Raises:
            ArgumentTypeError: it is no `ProcessSet`.
            ArgumentError: the set has no id.
        """
        check_set(process_set, self.job.where())._check(self.job)
        return bool(process_set.included())

    def communicators(self) -> list[_engine.Communicator]:
        """Returns the communicators of all sets that this rank is in, without that of all."""
        return [one._communicator for one in self._known if one._communicator is not None]

    def made_with(self, process_set: ProcessSet) -> tuple[Ranks, ...]:
        """Returns the ranks of a set and of those that were made together with it."""
        return tuple(self._ranks[number] for number in process_set._entry)

    def ranks_by_id(self, number: int) -> Ranks:
        """Returns the ranks of the set with an id.

        Raises:
            ArgumentError: there is none.
        """
        if number in self._ranks:
            return self._ranks[number]
        expected = f"the id of a process set, of {sorted(self._ranks)}"
        remedy = "Add the set first, and pass its process_set_id."
        raise errors.ArgumentError(errors.explain(self.job.where(), expected, repr(number), remedy))

    def find(self, wanted: Sequence[Ranks]) -> ProcessSet | None:
        """Returns a set that has some of these ranks, one that this rank is in if there is any.

        Args:
            wanted: the ranks of sets that were made together, in any order.
        """
        found = [one for one in self._known if one._ranks in wanted]
        return next((one for one in found if one.included()), found[0] if found else None)

    def add(self, list_them: Callable[[], list[ProcessSet]], operation: str) -> list[ProcessSet]:
        """Brings sets to life. Collective: every rank of the job; blocks.

        Args:
            list_them: gives the sets; what it raises on one rank is raised on all.
            operation: what the call is called in messages.

        Returns:
            The sets.

        Raises:
            MismatchError: the ranks pass other sets; raised on every rank.
            ArgumentError: a set is there already, or has ranks that the job has not; raised
                on every rank.
        """
        sets: list[ProcessSet] = []

        def wishes() -> list[tuple[str, Ranks]]:
            sets.extend(list_them())
            return [self._wish(one) for one in sets]

        with self.job.lock:
            self._ranks[GLOBAL] = tuple(self.job.ranks)  # some may have died since
            agreed = _agree(self._share(wishes, operation), self.job)
            self._check_new([ranks for entry in agreed for ranks in entry])
            for process_set, entry in zip(sets, agreed, strict=True):
                self._make(process_set, entry)
            self.job.subsets = len(self._ranks) - 1
        return sets

    def remove(self, process_set: Any, operation: str) -> bool:
        """Takes a set's id away. Collective: every rank of the job; blocks.

        Returns:
            Whether it had one; the set of all ranks stays, so for that it is `False`.

        Raises:
            MismatchError: the ranks pass other sets; raised on every rank.
            ArgumentTypeError: it is no `ProcessSet`; raised on every rank.
        """
        job = self.job
        if isinstance(process_set, ProcessSet) and process_set._communicator is not None:
            # What is queued asks for the set's communicator when it runs.
            process_set._communicator.finish_queued()
        with job.lock:
            entries = self._share(lambda: check_set(process_set)._entry, operation)
            for rank, entry in enumerate(entries):
                if entry != entries[0]:
                    expected, received = self._say(entries[0]), self._say(entry)
                    raise _mismatch(job, rank, f"to remove {expected} as on rank 0", received)
            if not entries[0] or GLOBAL in entries[0]:
                return False
            for number in entries[0]:
                del self._ranks[number]
            self.job.subsets = len(self._ranks) - 1
            self._known.remove(process_set)
            _release(process_set)
            return True

    def free(self) -> None:
        """Takes the ids of all sets away and gives all communicators back.

        Collective: every rank of the job.
        """
        self.job.finish_queued()
        for process_set in self._known:
            if process_set._communicator is not None:
                process_set._communicator.finish_queued()
            _release(process_set)
        self._known.clear()
        global_process_set._unbind()
        self.job.free()

    def _share(self, tell: Callable[[], Any], operation: str) -> list[Any]:
        """Returns what every rank tells. What is wrong on one rank is raised on all."""
        mine: Any
        try:
            mine = tell()
        except errors.KerasDistError as error:
            mine = error
        told = _engine.allgather_object(self.job, mine, operation=operation)
        for rank, one in enumerate(told):
            if isinstance(one, errors.KerasDistError):
                raise type(one)(f"[rank {rank} of {self.job.size}] {one}")
        return told

    def _wish(self, process_set: ProcessSet) -> tuple[str, Ranks]:
        """Returns what a set is made from, and its ranks."""
        if process_set is global_process_set:
            return "ranks", self._ranks[GLOBAL]
        if process_set.mpi_comm is not None:
            return "a communicator", _engine.places_of(self.job, process_set.mpi_comm)
        return "ranks", process_set._ranks or ()

    def _check_new(self, wanted: Sequence[Ranks]) -> None:
        taken = dict.fromkeys(self._ranks.values(), "a set that is there already")
        for number, ranks in enumerate(wanted):
            problem = taken.get(ranks)
            if not set(ranks) <= set(self._ranks[GLOBAL]):
                problem = f"a rank that the job has not: it has 0 to {self.job.size - 1}"
            if problem is not None:
                raise errors.ArgumentError(
                    errors.explain(
                        self.job.where(),
                        "process sets of ranks of this job, no two of them equal",
                        f"{say_ranks(ranks)}, {problem}",
                        "Use the set that is there, or remove it first by "
                        "keras_dist.remove_process_set; keras_dist.global_process_set is that "
                        "of all ranks.",
                    )
                )
            taken[ranks] = f"which is in the list twice, as number {number} too"

    def _make(self, process_set: ProcessSet, entry: Sequence[Ranks]) -> None:
        """Makes the sets of one entry; `process_set` becomes that which this rank is in."""
        numbers = []
        for ranks in entry:
            numbers.append(next(n for n in range(len(self._ranks) + 1) if n not in self._ranks))
            self._ranks[numbers[-1]] = ranks
        mine = next((i for i, ranks in enumerate(entry) if self.job.rank in ranks), None)
        # Only members take part in making a communicator; sets are made in the same order on
        # all ranks, so none waits for one that waits for it.
        communicator = None if mine is None else _engine.subset(self.job, entry[mine])
        number, ranks = numbers[mine or 0], entry[mine or 0]
        process_set._bind(number, ranks, self.job, communicator, tuple(numbers))
        self._known.append(process_set)

    def _say(self, entry: Sequence[int]) -> str:
        return (
            " and ".join(say_ranks(self._ranks[number]) for number in entry) or "a set without id"
        )


def _agree(wishes: Sequence[Sequence[tuple[str, Ranks]]], job: _engine.Communicator) -> list[Any]:
    """Returns for each entry of the ranks' lists the sets that come of it.

    A list of ranks is one set, and must be the same on all ranks. Of communicators there may
    be several; each of a communicator's ranks must have passed that one.
    """
    for rank, wish in enumerate(wishes):
        if len(wish) != len(wishes[0]):
            raise _mismatch(
                job, rank, f"{len(wishes[0])} process sets as on rank 0", f"{len(wish)}"
            )
    agreed = []
    for number, column in enumerate(zip(*wishes, strict=True)):
        label, first = f"process set number {number}", column[0]
        for rank, (kind, ranks) in enumerate(column):
            if kind != first[0] or (kind == "ranks" and ranks != first[1]):
                expected = f"{label} to be made from {_describe(first)} as on rank 0"
                raise _mismatch(job, rank, expected, _describe(column[rank]))
            for other in ranks if kind != "ranks" else ():
                if column[other][1] != ranks:
                    expected = f"{label} to be {_describe(column[rank])} as on rank {rank}"
                    raise _mismatch(job, other, expected, _describe(column[other]))
        agreed.append(sorted({ranks for _, ranks in column if ranks}))
        if not agreed[-1]:
            expected, received = f"{label} to have ranks", "MPI.COMM_NULL on every rank"
            remedy = "Pass a communicator on the ranks that are in it."
            raise errors.ArgumentError(errors.explain(job.where(), expected, received, remedy))
    return agreed


def _mismatch(
    job: _engine.Communicator, rank: int, expected: str, received: str
) -> errors.MismatchError:
    where = f"[rank {rank} of {job.size}]"
    return errors.MismatchError(errors.explain(where, expected, received, SAME_SETS))


def _describe(wish: tuple[str, Ranks]) -> str:
    kind, ranks = wish
    if kind == "ranks":
        return say_ranks(ranks)
    return f"a communicator of {say_ranks(ranks)}" if ranks else "MPI.COMM_NULL"


def _release(process_set: ProcessSet) -> None:
    communicator = process_set._communicator
    process_set._unbind()
    if communicator is not None:
        with communicator.lock:
            communicator.free()
