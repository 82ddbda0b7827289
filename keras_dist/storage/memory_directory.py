"""Directories for copies of backups in the memory of a node, of one job each. See decision 67."""

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

from keras_dist import config, runtime
from keras_dist.storage.ownership import is_private_directory, make_private_directory

OLD_SECONDS = 24 * 3600.0  # since its last use; the job has ended without removing it


def directory_of(job_id: str, backup_dir: Path) -> str:
    """Returns the name of the directory of a backup of a job; the same on every node."""
    return f"{_prefix(job_id)}{_digest(os.path.abspath(backup_dir))}"


def make_directory(name: str) -> Path:
    """Returns the path of a directory on this node, which is created if missing."""
    parent = _of_user(config.settings())
    make_private_directory(parent, runtime.where())
    (parent / name).mkdir(mode=0o700, exist_ok=True)
    # It is in use from now on, see `remove_old`.
    os.utime(parent / name)
    return parent / name


def find(name: str, settings: config.Settings) -> Path | None:
    """Returns the path of a directory on this node; `None` if there is none."""
    return next(iter(_directories(name, settings)), None)


def remove(name: str, settings: config.Settings | None = None) -> None:
    """Removes a directory, or those of a pattern, from this node."""
    for path in _directories(name, settings or config.settings()):
        shutil.rmtree(path, ignore_errors=True)


def remove_old(name: str) -> None:
    """Removes directories of this user that have not been used for a day."""
    latest, job = time.time() - OLD_SECONDS, name.partition("-")[0]
    for path in _directories("*", config.settings()):
        with contextlib.suppress(OSError):  # another process may remove it
            if not path.name.startswith(job) and path.stat().st_mtime < latest:
                shutil.rmtree(path, ignore_errors=True)


def remove_job(settings: config.Settings) -> None:
    """Removes the directories of a job from this node."""
    remove(f"{_prefix(settings.job_id)}*", settings)


def _directories(pattern: str, settings: config.Settings) -> list[Path]:
    parent = _of_user(settings)
    return [*parent.glob(pattern)] if is_private_directory(parent) else []


def _of_user(settings: config.Settings) -> Path:
    return Path(settings.memory_directory) / f"keras_dist_backups-{os.getuid()}"


def _prefix(job_id: str) -> str:
    return f"{_digest(job_id)}-"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
