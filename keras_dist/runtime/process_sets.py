"""Process sets: subsets of the ranks; see `process_set_table` for how they are registered."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, errors

Ranks = tuple[int, ...]


class ProcessSet:
    """A subset of the ranks, on which collectives can be called.

    A set is registered when it is passed to `keras_dist.init` or `keras_dist.add_process_set`,
    and can be used as `process_set` afterwards. Within a set the ranks keep their order.

    Args:
        ranks_or_comm: the ranks, in any order; or an `mpi4py.MPI.Comm`. Each rank passes the
            communicator that it belongs to, as `Comm.Split` returns it, and each communicator
            becomes a set. A rank without a communicator passes `MPI.COMM_NULL`.

    Attributes:
        mpi_comm: the user's communicator, if the set was made from one; `None` otherwise.

    Raises:
        ArgumentTypeError: `ranks_or_comm` is neither a list of ranks nor a communicator.
        ArgumentError: the list is empty, has a rank twice, or has a rank that is not an integer.

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
    _group_ids: tuple[int, ...]
    _job: _engine.Communicator | None
    _communicator: _engine.Communicator | None

    def __init__(self, ranks_or_comm: Iterable[int] | Any):
        self._unbind()
        self._ranks, self.mpi_comm = None, None
        if _engine.library.is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self._ranks = _parse_ranks(ranks_or_comm)

    @property
    def process_set_id(self) -> int | None:
        """The id of the set, 0 for the set of all ranks; `None` before it is registered."""
        return self._id

    @property
    def ranks(self) -> list[int] | None:
        """The ranks, ascending; `None` for a communicator's set before it is registered."""
        return None if self._ranks is None else list(self._ranks)

    def size(self) -> int | None:
        """Returns the number of ranks in the set; `None` before it is registered."""
        return None if self._id is None or self._ranks is None else len(self._ranks)

    def rank(self) -> int | None:
        """Returns the rank of this process in the set; `None` before the set is registered.

        Raises:
            ArgumentError: this rank is not in the set.
        """
        return None if self._job is None else self._communicator_in(self._job).rank

    def included(self) -> bool | None:
        """Returns whether this rank is in the set; `None` before the set is registered."""
        return None if self._id is None else self._communicator is not None

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self._id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    def _bind(
        self,
        set_id: int,
        ranks: Sequence[int],
        job: _engine.Communicator,
        communicator: _engine.Communicator | None,
        group_ids: tuple[int, ...],
    ) -> None:
        """Binds the set; `communicator` is `None` on other ranks, `group_ids` of its group."""
        self._id, self._ranks, self._group_ids = set_id, tuple(ranks), group_ids
        self._job, self._communicator = job, communicator

    def _unbind(self) -> None:
        self._id, self._group_ids = None, ()
        self._job, self._communicator = None, None

    def _communicator_in(self, job: _engine.Communicator) -> _engine.Communicator:
        """Returns the communicator of the set, which must be registered and include this rank."""
        self._check(job)
        if self._communicator is not None:
            return self._communicator
        raise errors.ArgumentError(
            job.where(),
            f"this rank to be in the process set, {format_ranks(self._ranks or ())}",
            f"rank {job.rank}",
            "Only ranks of the set may call its collectives or train with its optimizer: check "
            "process_set.included() first.",
        )

    def _check(self, job: _engine.Communicator) -> None:
        if self._job is job:
            return
        name = "a set" if self._ranks is None else f"a set of {format_ranks(self._ranks)}"
        raise errors.ArgumentError(
            job.where(),
            "process_set to be registered",
            f"{name} that was never added, or has been removed",
            "Pass it to keras_dist.init or keras_dist.add_process_set on every rank first, "
            "and use the same object.",
        )


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self._unbind()

    def _unbind(self) -> None:
        super()._unbind()
        self._ranks, self.mpi_comm = None, None


global_process_set = _GlobalProcessSet()


def check_process_sets(process_sets: Any) -> list[ProcessSet]:
    """Returns `process_sets` as a list."""
    if isinstance(process_sets, list | tuple):
        return [check_process_set(each) for each in process_sets]
    raise errors.ArgumentTypeError(
        "[keras_dist.init]",
        "process_sets to be a list of keras_dist.ProcessSet, or 'dynamic'",
        repr(process_sets),
        "Pass a list; keras_dist.add_process_set adds sets later.",
    )


def without_id(process_sets: Any) -> Any:
    """Returns the sets of a list that are not registered; any other value unchanged."""
    if not isinstance(process_sets, list | tuple):
        return process_sets
    return [each for each in process_sets if getattr(each, "process_set_id", None) is None]


def check_process_set(value: Any, where: str = "[keras_dist]") -> ProcessSet:
    """Returns `value`."""
    if isinstance(value, ProcessSet):
        return value
    raise errors.ArgumentTypeError(
        where,
        "a keras_dist.ProcessSet",
        f"{value!r} of type {type(value).__name__}",
        "Make a set from a list of ranks: keras_dist.ProcessSet([0, 1]).",
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks as text for messages, such as `ranks 0, 2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _parse_ranks(value: Any) -> Ranks:
    remedy = "Pass for example keras_dist.ProcessSet([0, 1])."
    try:
        ranks = list(value)
    except TypeError as error:
        raise errors.ArgumentTypeError(
            "[keras_dist.ProcessSet]",
            "a list of ranks or an mpi4py.MPI.Comm",
            f"{value!r} of type {type(value).__name__}",
            remedy,
        ) from error
    are_integers = all(isinstance(rank, int | np.integer) for rank in ranks)
    if not are_integers or not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
        expected = "at least one rank, distinct integers from 0 on"
        raise errors.ArgumentError("[keras_dist.ProcessSet]", expected, repr(value), remedy)
    return tuple(sorted(int(rank) for rank in ranks))
