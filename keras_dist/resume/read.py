"""Reading generations: the choice of the newest undamaged one, and what its parts hold."""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.resume import format, tensor_file
from keras_dist.resume.format import REMEDY, Generation
from keras_dist.resume.tensor_file import Extent
from keras_dist.storage.root_action import on_root

Value = TypeVar("Value")

LOOKS = 5  # at a directory that changes

_log = logging.getLogger("keras_dist")


@dataclasses.dataclass(frozen=True)
class Contents:
    """A generation, and what its parts hold."""

    generation: Generation
    # Consecutive elements of each variable, with the number of the first one.
    pieces: Mapping[int, Sequence[tuple[int, Extent]]]
    arrays: Mapping[str, Extent]  # those that are not variables, by name

    @property
    def about(self) -> Mapping[str, Any]:
        """What the manifest says."""
        return self.generation.about

    def others(self) -> dict[str, np.ndarray]:
        """Reads the arrays that are not variables, by name."""
        return {name: extent.read() for name, extent in self.arrays.items()}

    def elements(self, index: int, low: int, high: int) -> np.ndarray:
        """Returns the elements of a variable from `low` to `high`."""
        name, _, kind = self.about["variables"][index]
        found, at = np.empty(high - low, np.dtype(kind)), low
        target, itemsize = found.view(np.uint8).data, found.dtype.itemsize
        for first, extent in self.pieces.get(index, ()):
            end = min(high, first + extent.nbytes // itemsize)
            if first <= at < end:
                source = extent.offset + (at - first) * itemsize
                some = target[(at - low) * itemsize : (end - low) * itemsize]
                tensor_file.read_into(extent.path, source, some)
                at = end
        if at < high:
            raise errors.CheckpointError(
                f"all elements of {name!r} in the checkpoint {self.generation.path}",
                f"none from element {at} on",
                REMEDY,
            )
        return found


def bytes_by_name(part: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all arrays of a part."""
    return {name: extent.read() for name, extent in tensor_file.read_header(part).items()}


def contents_of(generation: Generation) -> Contents:
    """Reads the headers of all parts."""
    pieces: dict[int, list[tuple[int, Extent]]] = {}
    others = {}
    for path in generation.parts:
        for name, extent in tensor_file.read_header(path).items():
            index, _, first = name.partition(":")
            if index.isdecimal():  # backups of earlier versions have whole variables
                pieces.setdefault(int(index), []).append((int(first or 0), extent))
            else:
                others[name] = extent
    for found in pieces.values():
        found.sort(key=lambda piece: piece[0])
    return Contents(generation, pieces, others)


def look(path: pathlib.Path) -> Contents | str:
    """Returns the contents of a generation, or a phrase if they cannot be read."""
    try:
        generation = format.read(path)
        return (
            f"{path}: the digest does not match" if generation is None else contents_of(generation)
        )
    except (OSError, ValueError, KeyError) as error:
        return f"{path}: {error}"


def newest(
    directory: pathlib.Path, copy: pathlib.Path | None = None, number: int | None = None
) -> Contents | None:
    """Returns the newest undamaged generation, or `None`; reads all its bytes. Not collective."""

    def known() -> list[pathlib.Path]:
        found = _known(directory, number)
        if copy is None:
            return found
        return [*(p for p in found if format.number_of(p) > format.number_of(copy)), copy]

    return _newest(directory, known, format.find_damage, lambda work: work(), True)


def newest_of_all(
    directory: pathlib.Path, root_rank: int, number: int | None = None
) -> Contents | None:
    """Does the same on all ranks, each of which reads some parts. Collective; blocks."""
    comm = runtime.fit_communicator()

    def ask(work: Callable[[], Value]) -> Value:
        expected = f"to read the checkpoint in {directory}"
        return on_root(root_rank, expected, work, errors.CheckpointError, expected, REMEDY)

    def find_damage(found: Generation) -> list[str]:
        mine = format.find_damage(found, range(comm.rank, len(found.parts), comm.size))
        lists = _engine.collectives.allgather_object(
            comm, mine, operation="the digests of a checkpoint"
        )
        return [phrase for each in lists for phrase in each]

    is_root = comm.job.rank == root_rank
    return _newest(directory, lambda: _known(directory, number), find_damage, ask, is_root)


def _known(directory: pathlib.Path, number: int | None) -> list[pathlib.Path]:
    found = format.newest_first(directory)
    return [path for path in found if number in (None, format.number_of(path))]


def _newest(
    directory: pathlib.Path,
    paths: Callable[[], list[pathlib.Path]],
    find_damage: Callable[[Generation], list[str]],
    ask: Callable[[Callable[[], Any]], Any],
    warns: bool,
) -> Contents | None:
    known = ask(paths)
    for _ in range(LOOKS):
        damaged: list[str] = []
        for path in known:
            found = ask(functools.partial(look, path))
            phrases = [found] if isinstance(found, str) else find_damage(found.generation)
            if not phrases and isinstance(found, Contents):
                if damaged and warns:
                    _log.warning(
                        "keras_dist: a checkpoint is damaged: %s. An earlier generation is read, "
                        "%s.",
                        "; ".join(damaged),
                        path,
                    )
                return found
            damaged += phrases
        # A training that goes on may have removed what was read, behind newer generations.
        before, known = known, ask(paths)
        if not damaged or known == before:
            break
    if not damaged:
        return None
    expected = f"an undamaged generation in {directory}"
    raise errors.CheckpointError(expected, "; ".join(damaged), REMEDY)
