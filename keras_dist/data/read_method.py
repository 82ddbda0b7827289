"""The arguments of `hdf5` and `npy` that select how rows are read."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from keras_dist import errors
from keras_dist.data.file_index import Unreadable
from keras_dist.data.shard_options import Fact, ShardOptions

MpiIo = Literal["independent"]


@dataclasses.dataclass(frozen=True)
class ReadMethod:
    """How rows are read. Checked on creation."""

    block: int | None
    mpi_io: MpiIo | None
    readers: int | None
    unreadable: Unreadable
    options: ShardOptions

    def __post_init__(self) -> None:
        removed: object = self.mpi_io
        if removed == "collective":
            raise self._error(
                "mpi_io to be None or 'independent'",
                "'collective', which has been removed",
                "Pass mpi_io='independent', so that each rank reads its rows, or readers.",
            )
        self._one_of("mpi_io", (None, *get_args(MpiIo)))
        self._one_of("unreadable", get_args(Unreadable))
        self._check_count("block", None)
        self._check_count("readers", self.options.size)
        if self.readers is not None and self.mpi_io is not None:
            remedy = "Omit one of them."
            raise self._error("readers or mpi_io, not both", "both", remedy)
        if self.readers is not None and self.options.may_shrink:
            expected = "no rank that reads for others, as the others may go on without it"
            remedy = "Omit readers, so that each rank reads its rows."
            raise self._error(expected, f"readers={self.readers}", remedy)

    def facts(self) -> list[Fact]:
        """Returns the arguments on which all ranks must agree."""
        names = ("block", "mpi_io", "readers", "unreadable")
        return [Fact(name, getattr(self, name)) for name in names]

    def readers_of_ranks(self) -> list[int]:
        """Returns for each rank the rank that reads for it: the first of its group."""
        size = self.options.size
        groups = [rank * (self.readers or size) // size for rank in range(size)]
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
