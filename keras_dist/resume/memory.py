"""Copies of generations in the memory of the root's node and of the next node, see decision 67."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keras_dist import _engine, config, errors, runtime
from keras_dist.resume import format
from keras_dist.resume.format import number_of
from keras_dist.resume.read import Contents, newest
from keras_dist.resume.tensor_file import Tensor
from keras_dist.storage import memory_directory
from keras_dist.storage.root_action import on_root

PIECE_NBYTES = 2**26  # sent at once, so that ranks need no memory besides the copy
REMEDY = "Backups on disk are not affected."
Failures = tuple[type[Exception], ...]
FAILURES: Failures = (OSError, errors.ArgumentError, errors.RankLostError)

Value = TypeVar("Value")

_log = logging.getLogger("keras_dist")


class MemoryCopies:
    """The copies of the backups of one directory. Its methods are collective and block."""

    def __init__(self, backup_dir: Path, root_rank: int, wanted: bool = True):
        self._backup_dir, self._root_rank, self._wanted = backup_dir, root_rank, wanted
        self._name = ""  # of the directory on each node; empty: no copies
        self.number = 0  # of the newest generation
        self._intact: Path | None = None  # on this node: the newest copy known intact
        self._lost = ""  # names of copies that could not be brought to the root

    def find(self) -> Path | None:
        """Returns the newest intact copy on the root, fetched if elsewhere; else `None`."""
        self._name = self._on_root(self._choose_name) if self._wanted else ""
        if not self._name:
            return None
        self._lost, self._intact = "", self._newest() if self._is_keeper() else None
        mine = None if self._intact is None else self._intact.name
        found = _engine.collectives.allgather_object(
            runtime.communicator(), mine, operation="the copies of backups in memory"
        )
        copies = {rank: name for rank, name in enumerate(found) if name is not None}

        def age(rank: int) -> tuple[int, bool]:
            return -number_of(Path(copies[rank])), rank != self._root_rank

        for holder in sorted(copies, key=age):
            name, path = copies[holder], self._intact
            if holder != self._root_rank:
                path = self._move(name, holder, self._root_rank)
            if self._on_root(functools.partial(bool, path)):
                self.number = number_of(Path(name))
                return path if runtime.rank() == self._root_rank else None
        self._lost = ", ".join(sorted(set(copies.values())))
        return None

    def newest(self, copy: Path | None) -> Contents | None:
        """Returns the newest of what `find` returned, on the root, and of the backups on disk."""
        found = newest(self._backup_dir, copy)
        # No copy could be brought to the root.
        if found is None and self._lost:
            place = f"{config.settings().memory_directory} of {os.uname().nodename}"
            expected = f"a backup in {self._backup_dir}, or room in {place} for one of another node"
            received = f"only {self._lost} on another node, which could not be stored here"
            remedy = (
                "Remove the cause that the warnings name, and start the job again. With another "
                "KERAS_DIST_JOB_ID it starts over."
            )
            raise errors.CheckpointError(expected, received, remedy)
        return found

    def touch(self) -> None:
        """Shows other jobs that this job is alive. Not collective: each node for itself."""
        if self._name and self._is_keeper():
            self._directory()

    def next_number(self) -> int | None:
        """Returns the number of a new generation, on the root; `None` without copies."""
        # Nanoseconds since 1970: a copy of an earlier fit, on a node that was away when that fit
        # ended, never is the newest.
        return max(1 + self.number, time.time_ns()) if self._name else None

    def write(self, number: int, tensors: Sequence[Tensor], about: dict[str, Any]) -> Path | None:
        """Writes a copy on the root's node and the next one; returns the root's, on the root."""
        if not self._name:
            return None
        self.number = number

        def write(directory: Path) -> Path:
            return format.write(directory, tensors, about, self._previous(), number)

        def add() -> str | None:
            path = self._add(write)
            return None if path is None else path.name

        name = self._on_root(add)
        if name is None:
            return None
        nodes = runtime.communicator().topology.nodes
        own = next(at for at, node in enumerate(nodes) if self._root_rank in node)
        if len(nodes) > 1:
            self._move(name, self._root_rank, nodes[(own + 1) % len(nodes)][0])
        return self._intact if runtime.rank() == self._root_rank else None

    def remove(self) -> None:
        """Removes the copies from all nodes. Not collective: each node removes its own."""
        if self._name and self._is_keeper():
            memory_directory.remove(self._name)

    def _previous(self) -> int | None:
        return None if self._intact is None else number_of(self._intact)

    def _choose_name(self) -> str:
        job_id = config.settings().job_id
        if not job_id:
            expected = "KERAS_DIST_JOB_ID to be set, for backups in memory"
            remedy = (
                "Backups are written to disk only. keras-dist run sets the variable; with another "
                "launcher, set it to a text that a restarted job has again and no other job has."
            )
            _log.warning(errors.explain(runtime.where(), expected, "no such variable", remedy))
            return ""
        return memory_directory.directory_of(job_id, self._backup_dir)

    def _is_keeper(self) -> bool:
        """Returns whether this rank keeps the copies of its node: the root, or the first rank."""
        rank, nodes = runtime.rank(), runtime.communicator().topology.nodes
        node = next(node for node in nodes if rank in node)
        return rank == (self._root_rank if self._root_rank in node else node[0])

    def _directory(self) -> Path | None:
        with _warns("a directory for backups in memory"):
            return memory_directory.make_directory(self._name)
        return None

    def _newest(self) -> Path | None:
        """Returns the newest intact copy on this node."""
        directory = self._directory()
        memory_directory.remove_old(self._name)
        if directory is None:
            return None
        with _warns(f"an intact copy in {directory} of {os.uname().nodename}"):
            found = newest(directory)
            return None if found is None else found.generation.path
        return None

    def _add(self, write: Callable[[Path], Path]) -> Path | None:
        """Writes a copy on this node; logs a warning if it cannot be written."""
        directory = self._directory()
        if directory is None:
            return None
        with _warns(f"to write a backup into {directory}"):
            self._intact = write(directory)
            return self._intact
        return None

    def _move(self, name: str, source: int, target: int) -> Path | None:
        """Sends a copy from a rank to another, which keeps it; returns its path there."""
        comm = runtime.communicator()
        if comm.rank == source:
            self._send(comm, name, target)
        if comm.rank != target:
            return None
        blocks = _received(comm, name, source)

        def write(directory: Path) -> Path:
            return format.write_copy(directory, name, blocks, self._previous())

        path = self._add(write)
        with _warns(f"to receive a backup from rank {source}"):
            for _ in blocks:  # all of it is received, even if it cannot be written
                pass
        return path

    def _send(self, comm: _engine.Communicator, name: str, target: int) -> None:
        """Sends a copy in pieces; after the last, and if it cannot be read, an empty one."""
        # The next collective notices as well that the target is lost.
        with _warns(f"to send a backup to rank {target}", (errors.RankLostError,)):
            with _warns(f"to read {name}", (OSError, errors.ArgumentError, ValueError)):
                for block in read_blocks(memory_directory.make_directory(self._name) / name):
                    piece = np.frombuffer(block, np.uint8)
                    _engine.point_to_point.send(comm, piece, target, name)
            _engine.point_to_point.send(comm, np.empty(0, np.uint8), target, name)

    def _on_root(self, work: Callable[[], Value]) -> Value:
        expected, remedy = "to keep a backup in memory", "Pass memory=False."
        return on_root(self._root_rank, expected, work, errors.CheckpointError, expected, remedy)


def read_blocks(path: Path) -> Iterator[bytes]:
    """Reads the manifest of a generation, in one block, and then its part."""
    generation = format.read(path)
    if generation is None:
        raise OSError(f"{path} is damaged")
    yield path.read_bytes()
    with generation.parts[0].open("rb") as file:
        while block := file.read(PIECE_NBYTES):
            yield block


def _received(comm: _engine.Communicator, name: str, source: int) -> Iterator[memoryview]:
    """Receives the blocks of a copy."""
    while (piece := _engine.point_to_point.recv(comm, source, name)).size:
        yield piece.data


@contextlib.contextmanager
def _warns(expected: str, failures: Failures = FAILURES) -> Iterator[None]:
    """Logs a failure, after which training goes on with the generation on disk."""
    try:
        yield
    except failures as error:
        received = f"{type(error).__name__}: {error}"
        _log.warning(errors.explain(runtime.where(), expected, received, REMEDY))
