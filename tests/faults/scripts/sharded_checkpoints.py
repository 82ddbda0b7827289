"""Checkpoints of all ranks, on disks that fail, and of ranks that die."""

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

from faults import die, expect, fault, flip, limit_files, run
from fits import At, fit, on_root, rank

import keras_dist
from keras_dist.callbacks import ShardedCheckpoint
from keras_dist.errors import CheckpointError
from keras_dist.resume import format

folder = Path(os.environ["FOLDER"])


def no_room_and_a_stale_handle(folder: Path) -> None:
    flush = os.fsync

    def fail(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    def fail_behind_the_part(handle: int) -> None:
        if "json" in os.readlink(f"/proc/self/fd/{handle}"):
            fail(handle)
        flush(handle)

    def flush_with(function: Any) -> Any:
        return lambda: setattr(os, "fsync", function)

    acts: dict[Any, Any] = {
        ("epoch begin", 1): lambda: limit_files(1000),
        ("epoch begin", 2): limit_files,
        ("epoch begin", 3): flush_with(fail),
        ("epoch begin", 4): flush_with(flush),
    }
    if rank == 0:
        acts = {
            ("epoch begin", 5): flush_with(fail_behind_the_part),
            ("epoch begin", 6): flush_with(flush),
        }
    at = At(acts)
    fit(at, ShardedCheckpoint(folder, keep=9, asynchronous=False), epochs=7)
    assert at.epochs == [*range(7)]
    if rank == 0:
        whole: list[Any] = [format.read(path) for path in format.newest_first(folder)]
        assert [found.about["epoch"] for found in whole] == [7, 5, 3, 1]
        assert not any(format.find_damage(found, range(2)) for found in whole)
        assert len([*folder.iterdir()]) == 8  # nothing is left of the others


def damaged_parts(folder: Path) -> None:
    def damage_all() -> None:
        for path in folder.glob("*/*"):
            flip(path)

    fit(ShardedCheckpoint(folder), epochs=2)
    on_root(lambda: flip(format.parts_of(folder, 2, 2)[1]))
    at = At()
    fit(at, ShardedCheckpoint(folder), epochs=2)
    assert at.epochs == [1]
    on_root(damage_all)
    text = expect(CheckpointError, lambda: fit(ShardedCheckpoint(folder), epochs=5))
    assert "an undamaged generation in" in text, text
    assert "Restore the file, or remove the checkpoint to start over." in text, text


def on_disks_that_fail() -> None:
    fault()
    no_room_and_a_stale_handle(folder / "room")
    damaged_parts(folder / "damaged")


def roots_die() -> None:
    """The first before the manifest of a generation, the second behind it."""
    commit = format.commit

    def commit_and_die(*arguments: Any) -> None:
        if rank != 0:
            commit(*arguments)
        if rank < 2:
            die()

    mock.patch.object(format, "commit", commit_and_die).start()
    fit(ShardedCheckpoint(folder), epochs=3)
    if keras_dist.rank() == 0:
        whole: list[Any] = [format.read(path) for path in format.newest_first(folder)]
        assert [found.about["epoch"] for found in whole] == [3, 2]
        assert all(found.about["model"] for found in whole)
        assert [len(found.parts) for found in whole] == [1, 2]
        assert not any(format.find_damage(each, range(len(each.parts))) for each in whole)
        assert len([*folder.iterdir()]) == 4
        print("written by", keras_dist.size())


run(globals())
