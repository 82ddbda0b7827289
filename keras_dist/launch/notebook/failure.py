"""Failures of cells on other ranks, sent to the root so that the notebook shows them.

The root may be inside a collective while the job is about to end. So the failing rank writes a file
beside the notebook and waits until a thread of the root has read it. The file holds the start time
of its run, because files of an earlier run may be left.
"""

import contextlib
import glob
import json
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from keras_dist.launch.notebook import document
from keras_dist.storage import atomic_write

TURN_SECONDS = 0.1
TAKEN_SECONDS = 5.0  # the root may hold the interpreter, or be gone


def send(notebook: pathlib.Path, rank: int, failure: dict[str, Any]) -> None:
    """Sends a failure to the root; returns after the root has read it, or after a timeout.

    Args:
        notebook: file that the root writes.
        rank: this rank.
        failure: JSON value.
    """
    path, told = _path(notebook, str(rank)), None
    end = time.monotonic() + TAKEN_SECONDS
    with contextlib.suppress(OSError):  # the console shows it as well
        while time.monotonic() < end:
            taken = not path.exists()
            run = document.start_time(notebook)
            if run is not None and run != told:  # replaces the file of an earlier run
                with atomic_write.beside(path) as other:
                    other.write_text(json.dumps({"run": run, "failure": failure}))
                    atomic_write.move(other, path)
                told = run
            elif told is not None and taken:
                break
            time.sleep(TURN_SECONDS)
        path.unlink(missing_ok=True)


def listen(notebook: pathlib.Path, run: str, hear: Callable[[dict[str, Any]], None]) -> None:
    """Receives failures of other ranks in a thread, until the process ends."""

    def look() -> None:
        while True:
            time.sleep(TURN_SECONDS)
            for path in _failure_files(notebook):
                told = json.loads(path.read_text())
                if told.get("run") == run:
                    hear(told["failure"])
                path.unlink(missing_ok=True)

    threading.Thread(target=look, name="keras_dist notebook", daemon=True).start()


def _failure_files(notebook: pathlib.Path) -> list[pathlib.Path]:
    return sorted(notebook.parent.glob(f"{glob.escape(_path(notebook, '').name)}*"))


def _path(notebook: pathlib.Path, rank: str) -> pathlib.Path:
    return notebook.with_name(f".{notebook.name}.failed-{rank}")
