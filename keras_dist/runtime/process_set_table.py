"""The table of the process sets of a job, which the ranks add and remove collectively.

Ids and ranks of all sets are the same on every rank; only members hold a set's communicator.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist import _engine, errors
from keras_dist.runtime.process_sets import (
    ProcessSet,
    Ranks,
    check_process_set,
    format_ranks,
    global_process_set,
)

GLOBAL = 0  # the id of the set of all ranks
Request = tuple[str, Ranks]  # "ranks" or "a communicator", and the ranks
PLACE = re.compile(r"^\[[^]]*\] ")  # at the begin of a message
SAME_SETS = "Pass the same process sets, in the same order, on every rank."


class ProcessSetTable:
    """The process sets of a job, with the same ids and ranks on every rank."""

    def __init__(self, job: _engine.Communicator, mpi_comm: Any | None):
        self.job = job
        self._ranks: dict[int, Ranks] = {GLOBAL: tuple(job.ranks)}  # by id
        self._sets: list[ProcessSet] = []
        global_process_set._bind(GLOBAL, job.ranks, job, job, (GLOBAL,))
        global_process_set.mpi_comm = mpi_comm

    def communicators(self) -> list[_engine.Communicator]:
        """Returns the communicators of all sets that this rank is in, except the global set."""
        return [each._communicator for each in self._sets if each._communicator is not None]

    def ranks_of_group(self, process_set: ProcessSet) -> tuple[Ranks, ...]:
        """Returns the ranks of a set and of the sets added together with it."""
        return tuple(self._ranks[set_id] for set_id in process_set._group_ids)

    def ranks_by_id(self, set_id: int) -> Ranks:
        if set_id in self._ranks:
            return self._ranks[set_id]
        expected = f"the id of a process set, one of {sorted(self._ranks)}"
        remedy = "Add the set first, and pass its process_set_id."
        raise errors.ArgumentError(self.job.where(), expected, repr(set_id), remedy)

    def find(self, group: Sequence[Ranks]) -> ProcessSet | None:
        """Returns a set with one of these lists of ranks, preferably a set with this rank in it."""
        found = [each for each in self._sets if each._ranks in group]
        return next((each for each in found if each.included()), found[0] if found else None)

    def add(self, make_sets: Callable[[], list[ProcessSet]], operation: str) -> list[ProcessSet]:
        """Registers sets. Collective: every rank of the job; blocks."""
        sets: list[ProcessSet] = []

        def requests() -> list[Request]:
            sets.extend(make_sets())
            return [self._request(each) for each in sets]

        with self.job.lock:
            self._ranks[GLOBAL] = tuple(self.job.ranks)  # some may have died since
            groups = _match(self._gather(requests, operation), self.job)
            self._check_new([ranks for group in groups for ranks in group])
            for process_set, group in zip(sets, groups, strict=True):
                self._register(process_set, group)
            self.job.subsets = len(self._ranks) - 1
        return sets

    def remove(self, process_set: Any, operation: str) -> bool:
        """Removes a set. Collective: every rank of the job; blocks."""
        job = self.job
        if isinstance(process_set, ProcessSet) and process_set._communicator is not None:
            # Queued operations look up the set's communicator when they run.
            process_set._communicator.order.drain()
        with job.lock:
            groups = self._gather(lambda: check_process_set(process_set)._group_ids, operation)
            for rank, group in enumerate(groups):
                if group != groups[0]:
                    expected, received = self._format(groups[0]), self._format(group)
                    raise _mismatch(job, rank, f"to remove {expected} as on rank 0", received)
            if not groups[0] or GLOBAL in groups[0]:
                return False
            for set_id in groups[0]:
                del self._ranks[set_id]
            self.job.subsets = len(self._ranks) - 1
            self._sets.remove(process_set)
            _release(process_set)
            return True

    def free(self) -> None:
        """Unregisters all sets and frees all communicators. Collective: every rank of the job."""
        self.job.order.drain()
        for process_set in self._sets:
            if process_set._communicator is not None:
                process_set._communicator.order.drain()
            _release(process_set)
        self._sets.clear()
        global_process_set._unbind()
        self.job.free()

    def _gather(self, compute: Callable[[], Any], operation: str) -> list[Any]:
        """Returns the value of every rank. An error on one rank is raised on all."""
        value: Any
        try:
            value = compute()
        except errors.KerasDistError as error:
            value = error
        values = _engine.collectives.allgather_object(self.job, value, operation=operation)
        for rank, each in enumerate(values):
            if isinstance(each, errors.KerasDistError):
                text = PLACE.sub("", str(each))
                raise type(each)(f"[rank {rank} of {self.job.size}] {text}")
        return values

    def _request(self, process_set: ProcessSet) -> Request:
        if process_set is global_process_set:
            return "ranks", self._ranks[GLOBAL]
        if process_set.mpi_comm is not None:
            return "a communicator", _engine.ranks_of(self.job, process_set.mpi_comm)
        return "ranks", process_set._ranks or ()

    def _check_new(self, requested: Sequence[Ranks]) -> None:
        taken = dict.fromkeys(self._ranks.values(), "a set that exists already")
        for number, ranks in enumerate(requested):
            problem = taken.get(ranks)
            if not set(ranks) <= set(self._ranks[GLOBAL]):
                problem = f"a rank that does not exist: the job has 0 to {self.job.size - 1}"
            if problem is not None:
                raise errors.ArgumentError(
                    self.job.where(),
                    "process sets of ranks of this job, no two of them equal",
                    f"{format_ranks(ranks)}, {problem}",
                    "Use the existing set, or remove it first with "
                    "keras_dist.remove_process_set; keras_dist.global_process_set is the "
                    "set of all ranks.",
                )
            taken[ranks] = f"which is in the list twice, as number {number} too"

    def _register(self, process_set: ProcessSet, group: Sequence[Ranks]) -> None:
        """Registers the sets of a group; `process_set` becomes the set with this rank in it."""
        ids = []
        for ranks in group:
            ids.append(next(n for n in range(len(self._ranks) + 1) if n not in self._ranks))
            self._ranks[ids[-1]] = ranks
        own = next((i for i, ranks in enumerate(group) if self.job.rank in ranks), None)
        # Only members create a communicator. All ranks create sets in the same order, so this
        # does not deadlock.
        communicator = None if own is None else _engine.subset(self.job, group[own])
        process_set._bind(ids[own or 0], group[own or 0], self.job, communicator, tuple(ids))
        self._sets.append(process_set)

    def _format(self, group_ids: Sequence[int]) -> str:
        ranks = [format_ranks(self._ranks[set_id]) for set_id in group_ids]
        return " and ".join(ranks) or "a set without id"


def _match(requests: Sequence[Sequence[Request]], job: _engine.Communicator) -> list[Any]:
    """Returns the group of sets for each position of the ranks' lists."""
    for rank, own in enumerate(requests):
        if len(own) != len(requests[0]):
            expected = f"{len(requests[0])} process sets as on rank 0"
            raise _mismatch(job, rank, expected, f"{len(own)}")
    groups = []
    # A list of ranks must be the same on all ranks; a communicator on each of its ranks.
    for number, column in enumerate(zip(*requests, strict=True)):
        label, first = f"process set number {number}", column[0]
        for rank, (kind, ranks) in enumerate(column):
            if kind != first[0] or (kind == "ranks" and ranks != first[1]):
                expected = f"{label} to be made from {_describe(first)} as on rank 0"
                raise _mismatch(job, rank, expected, _describe(column[rank]))
            for other in ranks if kind != "ranks" else ():
                if column[other][1] != ranks:
                    expected = f"{label} to be {_describe(column[rank])} as on rank {rank}"
                    raise _mismatch(job, other, expected, _describe(column[other]))
        groups.append(sorted({ranks for _, ranks in column if ranks}))
        if not groups[-1]:
            expected, received = f"{label} to have ranks", "MPI.COMM_NULL on every rank"
            remedy = "Pass a communicator on the ranks that belong to it."
            raise errors.ArgumentError(job.where(), expected, received, remedy)
    return groups


def _mismatch(
    job: _engine.Communicator, rank: int, expected: str, received: str
) -> errors.MismatchError:
    where = f"[rank {rank} of {job.size}]"
    return errors.MismatchError(where, expected, received, SAME_SETS)


def _describe(request: Request) -> str:
    kind, ranks = request
    if kind == "ranks":
        return format_ranks(ranks)
    return f"a communicator of {format_ranks(ranks)}" if ranks else "MPI.COMM_NULL"


def _release(process_set: ProcessSet) -> None:
    communicator = process_set._communicator
    process_set._unbind()
    if communicator is not None:
        with communicator.lock:
            communicator.free()
