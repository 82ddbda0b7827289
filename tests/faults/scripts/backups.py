"""Backups and checkpoints of one file, and of an elastic state, on disks that fail."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from faults import expect, fault, flip, limit_files, run
from fits import At, build, fit, on_root, rank

from keras_dist.callbacks import BackupAndRestore, ModelCheckpoint
from keras_dist.errors import CheckpointError, MismatchError
from keras_dist.resume import format

folder = Path(os.environ["FOLDER"])
newest_first = format.newest_first


def expect_damage(call: Any, *arguments: Any, **options: Any) -> None:
    text = expect(CheckpointError, lambda: call(*arguments, **options))
    assert "an undamaged generation in" in text, text
    assert format.REMEDY in text, text


def damage_newest(damage: Any) -> None:
    damage(newest_first(folder)[0])


def damage_all() -> None:
    for path in newest_first(folder):
        flip(path)


def damaged() -> None:
    def cut_off(path: Path) -> None:
        os.truncate(path, path.stat().st_size - 1)

    backup = BackupAndRestore(folder, delete_checkpoint=False)
    fit(backup, epochs=2)
    fault()
    for epochs, damage in (3, flip), (4, cut_off):
        on_root(damage_newest, damage)
        at = At()
        fit(at, backup, epochs=epochs)
        assert at.epochs == [epochs - 2, epochs - 1], at.epochs
    on_root(damage_all)
    expect_damage(fit, backup, epochs=5)


def contents() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def no_room() -> None:
    before: dict[Path, bytes] = {}
    after: dict[Path, bytes] = {}

    def fill() -> None:
        while not (folder / "behind.keras").exists():
            time.sleep(0.05)
        before.update(contents())
        limit_files(1000)

    def make_room() -> None:
        after.update(contents())
        limit_files()

    at = At({("epoch begin", 1): fill, ("epoch begin", 3): make_room}, on=0)
    written = [
        BackupAndRestore(folder / "backup", delete_checkpoint=False),
        ModelCheckpoint(f"{folder}/model.keras"),
        ModelCheckpoint(f"{folder}/model.weights.h5", save_weights_only=True),
        ModelCheckpoint(f"{folder}/behind.keras", asynchronous=True),
    ]
    fault()
    fit(at, *written, epochs=4)
    assert at.epochs == [0, 1, 2, 3]
    if rank == 0:
        assert before == after
        names = {path.name for path in contents()}
        new = newest_first(folder / "backup")
        found: list[Any] = [format.read(path) for path in new]
        files = [*new, *(each.parts[0] for each in found)]
        expected = {*(p.name for p in files), "model.keras", "model.weights.h5", "behind.keras"}
        assert names == expected
        assert len(new) == 2 and new[1] in before and new[0] not in before
        assert all(contents()[path] != before[path] for path in folder.glob("*.*"))


def directory_goes_away() -> None:
    def take_place() -> None:
        assert len(newest_first(folder)) == 1
        shutil.rmtree(folder)
        folder.write_text("")

    fault()
    remove = {("epoch begin", 1): lambda: shutil.rmtree(folder), ("epoch begin", 2): take_place}
    at = At(remove, on=0)
    fit(at, BackupAndRestore(folder, delete_checkpoint=False), epochs=3)
    assert at.epochs == [0, 1, 2]


def replicas_diverge() -> None:
    model: Any = None

    def disturb() -> None:
        bias = model.layers[0].bias
        bias.assign(bias + 1.0)

    backup = BackupAndRestore(folder / "backup", delete_checkpoint=False)
    checkpoint = ModelCheckpoint(f"{folder}/{{epoch}}.keras")
    fault()
    for others, epochs in ([], 2), ([checkpoint], 3), ([backup], 3):
        model = build((3,))
        disturbed = [At({("epoch end", 1): disturb}, on=1), *others]
        text = expect(
            MismatchError,
            lambda: fit(*disturbed, model=model, epochs=epochs),  # noqa: B023
        )
        assert "Received: differences from rank 0 in" in text, text
        assert "dense0/bias (ranks 1). " in text, text
    if rank == 0:
        names = sorted(path.name for path in folder.iterdir())
        assert (names, len([*(folder / "backup").iterdir()])) == (["1.keras", "backup"], 2)


run(globals())
