"""What a rank has imported by its first steps, for processes that stand by. See decision 72."""

import json
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from keras_dist import config, errors
from keras_dist.runtime import launch_environment
from keras_dist.storage import atomic_write, memory_directory

POLL_SECONDS, SETTLE_SECONDS = 0.5, 1.0  # until the first step; after it
LONGEST_SECONDS = 60.0  # for a program that takes no steps
FILE = "imports"
STANDARD = sysconfig.get_path("stdlib")
READ = ("KERAS_", "JAX_", "XLA_", "TF_", "TORCH_", "PYTORCH_")  # by frameworks, at their import


def tell_imports() -> None:
    """Starts the thread that writes the file, on one rank of each node."""
    if launch_environment.announced_local_rank() == 0:
        threading.Thread(target=_tell, name="keras_dist imports", daemon=True).start()


def imports_file() -> Path | None:
    """Returns the path of the file of this job on this node; `None` before it is written."""
    found = memory_directory.find(_directory(), config.settings())
    return None if found is None else found / FILE


def remove_imports() -> None:
    """Removes the file of this job from this node."""
    memory_directory.remove(_directory())


def read_imports(restart: int) -> dict[str, Any] | None:
    """Returns the modules and variables that a start of the job has told; `None` before."""
    if (path := imports_file()) is None:
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found["restart"] == restart else None


def _directory() -> str:
    return memory_directory.directory_of(config.settings().job_id, Path("/imports"))


def _tell() -> None:
    from keras_dist import _engine  # imports numpy, which a process that stands by does later

    end = time.monotonic() + LONGEST_SECONDS
    while not _engine.progress.done() and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    time.sleep(SETTLE_SECONDS)
    changed = _changed_variables()
    # The program chooses GPUs itself, which precedes the imports.
    chooses = any(name.endswith("VISIBLE_DEVICES") for name in changed)
    found = {
        "restart": config.settings().restart,
        "steps": _engine.progress.done(),
        "modules": [] if chooses else _modules(),
        "mpi": _engine.library.is_loaded_here(),
        "environment": {name: text for name, text in changed.items() if name.startswith(READ)},
    }
    try:
        memory_directory.remove_old(_directory())
        target = memory_directory.make_directory(_directory()) / FILE
        with atomic_write.beside(target) as path:
            path.write_text(json.dumps(found))
            atomic_write.move(path, target)
    except (OSError, errors.ArgumentError):
        pass  # a restart imports by itself


def _modules() -> list[tuple[str, str | None]]:
    """Returns the installed modules and their files, in the order of their imports."""
    # Modules of the user may be changed before a restart, or do something when they are imported.
    specs = [(name, getattr(each, "__spec__", None)) for name, each in list(sys.modules.items())]
    return [(name, spec.origin) for name, spec in specs if spec and _is_installed(name, spec)]


def _is_installed(name: str, spec: Any) -> bool:
    # The import of MPI initializes it.
    if spec.name != name or name.startswith(("__main__", "mpi4py.")):
        return False
    parts = Path(spec.origin or "").parts
    return (
        name.partition(".")[0] == "keras_dist"
        or not {"site-packages", "dist-packages"}.isdisjoint(parts)
        or parts[: len(Path(STANDARD).parts)] == Path(STANDARD).parts
    )


def _changed_variables() -> dict[str, str | None]:
    """Returns the variables that this process has changed since its start; `None`: removed."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    before = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs)
    names = {*before, *os.environ} - {"", *launch_environment.THREADS}
    return {name: now for name in names if (now := os.environ.get(name)) != before.get(name)}
