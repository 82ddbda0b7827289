"""The choice of the generation to read: the newest that is whole and undamaged."""

import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from keras_dist import _engine, errors, runtime
from keras_dist.checkpoints.reading import Contents, contents_of
from keras_dist.storage import generations
from keras_dist.storage.generations import REMEDY, Generation
from keras_dist.storage.root_action import on_root

Value = TypeVar("Value")

LOOKS = 5  # at a directory that changes

_log = logging.getLogger("keras_dist")


def newest(directory: pathlib.Path) -> Contents | None:
    """Returns the newest undamaged generation, or `None` if there is none; reads all its bytes.

    Does not communicate.
    """
    return _newest(
        lambda: generations.newest_first(directory),
        _look,
        lambda found: generations.find_damage(found, range(len(found.parts))),
        directory,
        True,
    )


def newest_of_all(directory: pathlib.Path, root_rank: int) -> Contents | None:
    """Does the same on all ranks, each of which reads some parts. Collective; blocks."""
    comm = runtime.fit_communicator()

    def ask(work: Callable[[], Value]) -> Value:
        expected = f"to read the checkpoint in {directory}"
        return on_root(root_rank, expected, work, errors.CheckpointError, expected, REMEDY)

    def find_damage(found: Generation) -> list[str]:
        mine = generations.find_damage(found, range(comm.rank, len(found.parts), comm.size))
        lists = _engine.collectives.allgather_object(
            comm, mine, operation="the digests of a checkpoint"
        )
        return [phrase for each in lists for phrase in each]

    return _newest(
        lambda: ask(lambda: generations.newest_first(directory)),
        lambda path: ask(lambda: _look(path)),
        find_damage,
        directory,
        comm.job.rank == root_rank,
    )


def _look(path: pathlib.Path) -> Contents | str:
    """Returns the contents of a generation, or a phrase if they cannot be read."""
    try:
        generation = generations.read(path)
        return (
            f"{path}: the digest does not match" if generation is None else contents_of(generation)
        )
    except (OSError, ValueError, KeyError) as error:
        return f"{path}: {error}"


def _newest(
    paths: Callable[[], list[pathlib.Path]],
    look: Callable[[pathlib.Path], Contents | str],
    find_damage: Callable[[Generation], list[str]],
    directory: pathlib.Path,
    warns: bool,
) -> Contents | None:
    known = paths()
    for _ in range(LOOKS):
        found, damaged = _newest_of(known, look, find_damage, warns)
        if found is not None or not damaged:
            return found
        # A training that goes on may have removed what was read, behind newer generations.
        if (now := paths()) == known:
            break
        known = now
    expected = f"an undamaged generation in {directory}"
    text = errors.explain(runtime.where(), expected, "; ".join(damaged), REMEDY)
    raise errors.CheckpointError(text)


def _newest_of(
    paths: Sequence[pathlib.Path],
    look: Callable[[pathlib.Path], Contents | str],
    find_damage: Callable[[Generation], list[str]],
    warns: bool,
) -> tuple[Contents | None, list[str]]:
    """Returns the first undamaged generation, or `None`, and phrases about those before it."""
    damaged: list[str] = []
    for path in paths:
        found = look(path)
        phrases = [found] if isinstance(found, str) else find_damage(found.generation)
        if not phrases and not isinstance(found, str):
            if damaged and warns:
                _log.warning(
                    "keras_dist: a checkpoint is damaged: %s. An earlier generation is read, %s.",
                    "; ".join(damaged),
                    path,
                )
            return found, damaged
        damaged += phrases
    return None, damaged
