"""Backups and checkpoints on disks that fail, and of replicas that diverge."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from faults import expect, fault, flip, limit_files
from fits import At, build, fit, on_root, rank

from keras_dist.callbacks import BackupAndRestore, ModelCheckpoint
from keras_dist.errors import CheckpointError, MismatchError
from keras_dist.resume import format

newest_first = format.newest_first


def damaged(folder: Path) -> None:
    def cut_off(path: Path) -> None:
        os.truncate(path, path.stat().st_size - 1)

    def damage_all() -> None:
        for path in newest_first(folder):
            flip(path)

    backup = BackupAndRestore(folder, delete_checkpoint=False)
    fit(backup, epochs=2)
    for epochs, damage in (3, flip), (4, cut_off):
        on_root(lambda: damage(newest_first(folder)[0]))  # noqa: B023
        at = At()
        fit(at, backup, epochs=epochs)
        assert at.epochs == [epochs - 2, epochs - 1], at.epochs
    on_root(damage_all)
    text = expect(CheckpointError, lambda: fit(backup, epochs=5))
    assert "an undamaged generation in" in text, text
    assert format.REMEDY in text, text


def no_room(folder: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

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


def directory_goes_away(folder: Path) -> None:
    def take_place() -> None:
        assert len(newest_first(folder)) == 1
        shutil.rmtree(folder)
        folder.write_text("")

    remove = {("epoch begin", 1): lambda: shutil.rmtree(folder), ("epoch begin", 2): take_place}
    at = At(remove, on=0)
    fit(at, BackupAndRestore(folder, delete_checkpoint=False), epochs=3)
    assert at.epochs == [0, 1, 2]


def replicas_diverge(folder: Path) -> None:
    model: Any = None

    def disturb() -> None:
        bias = model.layers[0].bias
        bias.assign(bias + 1.0)

    backup = BackupAndRestore(folder / "backup", delete_checkpoint=False)
    checkpoint = ModelCheckpoint(f"{folder}/{{epoch}}.keras")
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


fault()
for fail in damaged, no_room, directory_goes_away, replicas_diverge:
    fail(Path(os.environ["FOLDER"], fail.__name__))
