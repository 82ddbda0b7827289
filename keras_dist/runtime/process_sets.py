"""Process sets: some of the ranks, which can call collectives among themselves.

Knows what a set is and how users write one. Which sets there are, and how they come to life,
is in `set_table`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, errors

__all__ = [
    "ProcessSet",
    "Ranks",
    "as_set",
    "check_list",
    "check_set",
    "global_process_set",
    "say_ranks",
    "without_id",
]

Ranks = tuple[int, ...]


class ProcessSet:
    """Some of the ranks, which can call collectives among themselves.

    It comes to life when it is passed to `keras_dist.init` or `keras_dist.add_process_set`,
    and can be passed as `process_set` from then on. Within a set the ranks keep their order.

    Args:
        ranks_or_comm: the ranks, in any order; or an `mpi4py.MPI.Comm` of these ranks. A
            communicator is made by its own ranks alone, so each rank passes the one that it
            is in, as `Comm.Split` gives them: one set for each. A rank that is in none
            passes `MPI.COMM_NULL`.

    Attributes:
        mpi_comm: the user's communicator, when it was made from one; `None` otherwise.

    Raises:
        ArgumentTypeError: `ranks_or_comm` is neither.
        ArgumentError: there is no rank, one occurs twice, or one is not a whole number.

    Example:
    ```python
    even = keras_dist.ProcessSet(range(0, size, 2))
    keras_dist.init(process_sets=[even])
    if even.included():
        total = keras_dist.allreduce(value, "sum", process_set=even)
    ```
    """

    mpi_comm: Any
    _ranks: Ranks | None
    _id: int | None
    _entry: tuple[int, ...]
    _job: _engine.Communicator | None
    _communicator: _engine.Communicator | None

    def __init__(self, ranks_or_comm: Iterable[int] | Any):
        self._unbind()
        self._ranks, self.mpi_comm = None, None
        if _engine.is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self._ranks = _parse_ranks(ranks_or_comm)

    @property
    def process_set_id(self) -> int | None:
        """The number of the set, 0 for that of all ranks; `None` as long as it has none."""
        return self._id

    @property
    def ranks(self) -> list[int] | None:
        """The ranks, ascending; `None` where they are not known before the set has an id."""
        return None if self._ranks is None else list(self._ranks)

    def size(self) -> int | None:
        """Returns the number of ranks in the set; `None` as long as it has no id."""
        return None if self._id is None or self._ranks is None else len(self._ranks)

    def rank(self) -> int | None:
        """Returns the number of this rank within the set; `None` as long as it has no id.

        Raises:
            ArgumentError: this rank is not in the set.
        """
        return None if self._job is None else self._among(self._job).rank

    def included(self) -> bool | None:
        """Tells whether this rank is in the set; `None` as long as it has no id."""
        return None if self._id is None else self._communicator is not None

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self._id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    def _bind(
        self,
        number: int,
        ranks: Sequence[int],
        job: _engine.Communicator,
        communicator: _engine.Communicator | None,
        entry: tuple[int, ...],
    ) -> None:
        """Brings the set to life.

        Args:
            number: its id.
            ranks: its ranks, ascending.
            job: the communicator of all ranks.
            communicator: that of the set; `None` on a rank that is not in it.
            entry: the ids of the sets that the ranks made together, this one among them.
        """
        self._id, self._ranks, self._entry = number, tuple(ranks), entry
        self._job, self._communicator = job, communicator

    def _unbind(self) -> None:
        self._id, self._entry = None, ()
        self._job, self._communicator = None, None

    def _among(self, job: _engine.Communicator) -> _engine.Communicator:
        """Returns the communicator of the set.

        Raises:
            ArgumentError: this rank is not in the set, or the set has no id.
        """
        self._check(job)
        if self._communicator is not None:
            return self._communicator
        raise errors.ArgumentError(
            errors.explain(
                job.where(),
                f"this rank to be in the process set that it uses, {say_ranks(self._ranks or ())}",
                f"rank {job.rank}",
                "Only the ranks of the set may call, or train with an optimizer of it: ask "
                "process_set.included() first.",
            )
        )

    def _check(self, job: _engine.Communicator) -> None:
        if self._job is job:
            return
        what = "a set" if self._ranks is None else f"a set of {say_ranks(self._ranks)}"
        raise errors.ArgumentError(
            errors.explain(
                job.where(),
                "process_set to be one that keras_dist knows",
                f"{what} that was never added, or removed since",
                "Pass it to keras_dist.init or keras_dist.add_process_set on every rank first, "
                "and use the object that was passed.",
            )
        )


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self._unbind()

    def _unbind(self) -> None:
        super()._unbind()
        self._ranks, self.mpi_comm = None, None


global_process_set = _GlobalProcessSet()


def as_set(value: Any) -> ProcessSet:
    """Returns a `ProcessSet`, made from `value` unless it is one."""
    return value if isinstance(value, ProcessSet) else ProcessSet(value)


def check_list(process_sets: Any) -> list[ProcessSet]:
    """Returns a list of sets.

    Raises:
        ArgumentTypeError: it is none.
    """
    if isinstance(process_sets, list | tuple):
        return [check_set(one) for one in process_sets]
    raise errors.ArgumentTypeError(
        errors.explain(
            "[keras_dist.init]",
            "process_sets to be a list of keras_dist.ProcessSet, or 'dynamic'",
            repr(process_sets),
            "Pass a list; sets can also be added later, by keras_dist.add_process_set.",
        )
    )


def without_id(process_sets: Any) -> Any:
    """Returns those of a list of sets that have no id yet; anything else as it is."""
    if not isinstance(process_sets, list | tuple):
        return process_sets
    return [one for one in process_sets if getattr(one, "process_set_id", None) is None]


def check_set(value: Any, where: str = "[keras_dist]") -> ProcessSet:
    """Returns `value`.

    Raises:
        ArgumentTypeError: it is no `ProcessSet`.
    """
    if isinstance(value, ProcessSet):
        return value
    raise errors.ArgumentTypeError(
        errors.explain(
            where,
            "a keras_dist.ProcessSet",
            f"{value!r} of type {type(value).__name__}",
            "Make one of a list of ranks: keras_dist.ProcessSet([0, 1]).",
        )
    )


def say_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks for messages, such as `ranks 0, 2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _parse_ranks(value: Any) -> Ranks:
    remedy = "Pass for example keras_dist.ProcessSet([0, 1])."
    try:
        ranks = list(value)
    except TypeError as error:
        raise errors.ArgumentTypeError(
            errors.explain(
                "[keras_dist.ProcessSet]",
                "a list of ranks or an mpi4py.MPI.Comm",
                f"{value!r} of type {type(value).__name__}",
                remedy,
            )
        ) from error
    whole = all(isinstance(rank, int | np.integer) for rank in ranks)
    if not whole or not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
        expected = "at least one rank, each a whole number from 0 on, none twice"
        raise errors.ArgumentError(
            errors.explain("[keras_dist.ProcessSet]", expected, repr(value), remedy)
        )
    return tuple(sorted(int(rank) for rank in ranks))
