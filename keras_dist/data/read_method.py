"""The arguments of `hdf5` and `npy` that select how rows are read."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.file_index import Unreadable
from keras_dist.data.shard_options import Fact, ShardOptions

MpiIo = Literal["independent", "collective"]


@dataclasses.dataclass(frozen=True)
class ReadMethod:
    """How rows are read. Checked on creation."""

    block: int | None
    mpi_io: MpiIo | None
    readers: int | None
    unreadable: Unreadable
    options: ShardOptions

    def __post_init__(self) -> None:
        self._one_of("mpi_io", (None, *get_args(MpiIo)))
        self._one_of("unreadable", get_args(Unreadable))
        self._check_count("block", None)
        self._check_count("readers", self.options.size)
        if self.readers is not None and self.mpi_io is not None:
            remedy = "Omit one of them."
            raise self._error("readers or mpi_io, not both", "both", remedy)
        if self.mpi_io == "collective" and self.options.may_shrink:
            remedy = "Pass mpi_io='independent', or start without --with-ft ulfm."
            raise self._error("no collective reads where ranks may die", "both", remedy)

    def facts(self) -> list[Fact]:
        """Returns the arguments on which all ranks must agree."""
        names = ("block", "mpi_io", "readers", "unreadable")
        return [Fact(name, getattr(self, name)) for name in names]

    def servers(self) -> list[int]:
        """Returns for each rank the rank that reads for it: the first of its group."""
        size = self.options.size
        if self.readers is None or self.readers == size:
            return list(range(size))
        if not runtime.communicator().thread_multiple:
            runtime.notify(
                "keras_dist reads on every rank, as readers requires an MPI that allows calls "
                "from several threads at once (MPI_THREAD_MULTIPLE)."
            )
            return list(range(size))
        groups = [rank * self.readers // size for rank in range(size)]
        return [groups.index(group) for group in groups]

    def _one_of(self, name: str, choices: Sequence[object]) -> None:
        value = getattr(self, name)
        if value not in choices:
            expected = f"{name} to be one of {', '.join(map(repr, choices))}"
            raise self._error(expected, repr(value), "See hdf5() for what each does.")

    def _check_count(self, name: str, most: int | None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise self.options.wrong_kind(f"{name} to be a whole number", value)
        if value < 1 or (most is not None and value > most):
            limits = f"1 to {most}, the number of ranks" if most else "at least 1"
            raise self._error(f"{name} to be {limits}", str(value), "Omit it.")

    def _error(self, expected: str, received: str, remedy: str) -> errors.ArgumentError:
        return errors.ArgumentError(self.options.where, expected, received, remedy)
