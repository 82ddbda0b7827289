"""Copies of backups in the memory of the root's node and of the next node.

A copy is the file of a backup, in a memory file system. It survives the ranks of the job: a
restarted job finds it on any node that is left, and no disk is read. Copies that cannot be written
or read cause a warning, and the backup on disk remains.
"""

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from keras_dist import _engine, config, errors, runtime
from keras_dist.storage import memory_directory, versioned_backups
from keras_dist.storage.root_action import on_root

PIECE_NBYTES = 2**26  # sent at once, so that ranks need no memory besides the copy
REMEDY = "Backups on disk are not affected."
FAILURES = (OSError, errors.ArgumentError, errors.RankLostError)

Value = TypeVar("Value")
Save = Callable[[BinaryIO], None]
Copy = tuple[str, int]  # name and number of bytes

_log = logging.getLogger("keras_dist")


class MemoryCopies:
    """The copies of the backups of one directory. Its methods are collective and block."""

    def __init__(self, backup_dir: Path, root_rank: int, wanted: bool = True):
        self._backup_dir, self._root_rank, self._wanted = backup_dir, root_rank, wanted
        self._name = ""  # of the directory on each node; empty: no copies
        self._number = 0  # of the newest backup
        self._intact: Path | None = None  # on this node: the newest copy known intact
        self._lost = ""  # names of copies that could not be brought to the root

    def find(self) -> Path | None:
        """Returns, on the root, the path of the newest intact copy, fetched from another node.

        Returns `None` on other ranks, and if there is no copy.
        """
        self._name = self._on_root(self._choose_name) if self._wanted else ""
        if not self._name:
            return None
        self._lost, self._intact = "", self._newest() if self._is_keeper() else None
        mine = None if self._intact is None else _copy_of(self._intact)
        found = _engine.collectives.allgather_object(
            runtime.communicator(), mine, operation="the copies of backups in memory"
        )
        copies = {rank: copy for rank, copy in enumerate(found) if copy is not None}

        def age(rank: int) -> tuple[int, bool]:
            return -_number_of(copies[rank]), rank != self._root_rank

        for holder in sorted(copies, key=age):
            copy, path = copies[holder], self._intact
            if holder != self._root_rank:
                path = self._move(copy, holder, self._root_rank)
            if self._on_root(functools.partial(bool, path)):
                self._number = _number_of(copy)
                return path if runtime.rank() == self._root_rank else None
        self._lost = ", ".join(sorted({name for name, _ in copies.values()}))
        return None

    def check_not_lost(self) -> None:
        """Checks, on the root, that `find` has brought a copy if there are any."""
        if self._lost:
            place = f"{config.settings().memory_directory} of {os.uname().nodename}"
            expected = f"a backup in {self._backup_dir}, or room in {place} for one of another node"
            received = f"only {self._lost} on another node, which could not be stored here"
            remedy = (
                "Remove the cause that the warnings name, and start the job again. With another "
                "KERAS_DIST_JOB_ID it starts over."
            )
            raise errors.CheckpointError(runtime.where(), expected, received, remedy)

    def touch(self) -> None:
        """Shows other jobs that this job is alive. Not collective: each node for itself."""
        if self._name and self._is_keeper():
            self._directory()

    def write(self, save: Save) -> Path | None:
        """Writes a copy on the root's node and on the next one.

        Returns:
            The path of the root's copy, on the root; `None` on others and if it was not written.
        """
        if not self._name:
            return None

        def add() -> tuple[int, Copy | None]:
            number = self._next_number()
            path = self._add(save, number)
            self._intact = path or self._intact
            return number, None if path is None else _copy_of(path)

        self._number, copy = self._on_root(add)
        if copy is None:
            return None
        nodes = runtime.communicator().topology.nodes
        own = next(at for at, node in enumerate(nodes) if self._root_rank in node)
        if len(nodes) > 1:
            self._move(copy, self._root_rank, nodes[(own + 1) % len(nodes)][0])
        return self._intact if runtime.rank() == self._root_rank else None

    def number(self) -> int | None:
        """Returns the number of the newest backup; `None` without copies."""
        return self._number if self._name else None

    def remove(self) -> None:
        """Removes the copies from all nodes. Not collective: each node removes its own."""
        if self._name and self._is_keeper():
            memory_directory.remove(self._name)

    def _next_number(self) -> int:
        """Returns the number of the next backup: nanoseconds since 1970, or more than the last.

        A copy of an earlier fit, on a node that was away when that fit ended, never is the newest.
        """
        try:
            on_disk = versioned_backups.newest_first(self._backup_dir)
        except OSError:  # the write to disk fails as well, which is logged
            on_disk = []
        known = max([self._number, *map(versioned_backups.number_of, on_disk[:1])])
        return max(1 + known, time.time_ns())

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
        try:
            return memory_directory.make_directory(self._name)
        except FAILURES as error:
            _warn("a directory for backups in memory", error)
            return None

    def _newest(self) -> Path | None:
        """Returns the newest intact copy on this node."""
        directory = self._directory()
        memory_directory.remove_old(self._name)
        for path in versioned_backups.newest_first(directory) if directory else []:
            if versioned_backups.is_intact(path):
                return path
            _log.warning(
                "%s on %s is damaged: the digest does not match. Training resumes from another "
                "backup.",
                path,
                os.uname().nodename,
            )
        return None

    def _add(self, save: Save, number: int) -> Path | None:
        """Writes a copy on this node; logs a warning if it cannot be written."""
        directory = self._directory()
        if directory is None:
            return None
        try:
            return versioned_backups.add(directory, save, self._intact, number=number)
        except FAILURES as error:
            _warn(f"to write a backup into {directory}", error)
            return None

    def _move(self, copy: Copy, source: int, target: int) -> Path | None:
        """Sends a copy from a rank to another, which keeps it; returns its path there."""
        comm = runtime.communicator()
        if comm.rank == source:
            self._send(comm, copy, target)
        if comm.rank != target:
            return None
        receiver = _Receiver(comm, copy, source)
        path = self._add(receiver.save, _number_of(copy))
        receiver.finish()
        if path is not None and path.name != copy[0]:  # the name contains the digest
            path.unlink(missing_ok=True)
            _log.warning("%s arrived damaged on %s.", copy[0], os.uname().nodename)
            path = None
        self._intact = path or self._intact
        return path

    def _send(self, comm: _engine.Communicator, copy: Copy, target: int) -> None:
        """Sends a copy in pieces; an empty piece if it cannot be read."""
        name, nbytes = copy
        try:
            path = memory_directory.make_directory(self._name) / name
            contents: np.ndarray = np.memmap(path, np.uint8, "r", shape=nbytes)
        except (*FAILURES, ValueError) as error:  # ValueError: the file is shorter
            _warn(f"to read {name}", error)
            contents = np.empty(0, np.uint8)
        try:
            for low in range(0, max(1, contents.size), PIECE_NBYTES):
                piece = contents[low : low + PIECE_NBYTES]
                _engine.point_to_point.send(comm, piece, target, name)
        except errors.RankLostError as error:  # the next collective notices it as well
            _warn(f"to send a backup to rank {target}", error)

    def _on_root(self, work: Callable[[], Value]) -> Value:
        expected, remedy = "to keep a backup in memory", "Pass memory=False."
        return on_root(self._root_rank, expected, work, errors.CheckpointError, expected, remedy)


class _Receiver:
    """A copy that another rank sends. All of it is received, even if it cannot be written."""

    def __init__(self, comm: _engine.Communicator, copy: Copy, source: int):
        self._comm, self._source = comm, source
        self._name, self._left = copy

    def save(self, file: BinaryIO) -> None:
        while self._left:
            file.write(self._receive())

    def finish(self) -> None:
        try:
            while self._left:
                self._receive()
        except (OSError, errors.RankLostError) as error:
            _warn(f"to receive a backup from rank {self._source}", error)

    def _receive(self) -> memoryview:
        piece = _engine.point_to_point.recv(self._comm, self._source, self._name)
        if not piece.size:
            self._left = 0
            raise OSError(f"rank {self._source} cannot read {self._name}")
        self._left -= piece.size
        return piece.data


def _copy_of(path: Path) -> Copy:
    return path.name, path.stat().st_size


def _number_of(copy: Copy) -> int:
    return versioned_backups.number_of(Path(copy[0]))


def _warn(expected: str, error: Exception) -> None:
    received = f"{type(error).__name__}: {error}"
    _log.warning(errors.explain(runtime.where(), expected, received, REMEDY))
