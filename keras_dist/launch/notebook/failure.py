"""How the root hears that a cell has failed on another rank, so that the notebook holds it.

The root may be within a collective then, and the job is about to end: the other rank leaves a file
beside the notebook, and waits until a thread of the root has taken it. The file says when the run
began that it belongs to, as the notebook does: both may be there from an earlier one.
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

__all__ = ["listen", "tell"]

TURN_SECONDS = 0.1
TAKEN_SECONDS = 5.0  # the root may be where no thread of it runs, or be gone


def tell(notebook: pathlib.Path, rank: int, failure: dict[str, Any]) -> None:
    """Tells the root of a failure; returns when it has heard of it, or has had its time.

    Args:
        notebook: the file that the root writes.
        rank: this rank.
        failure: what the root is to be told, of what JSON knows.
    """
    path, told = _path(notebook, str(rank)), None
    end = time.monotonic() + TAKEN_SECONDS
    with contextlib.suppress(OSError):  # there is still the console
        while time.monotonic() < end:
            taken = not path.exists()
            run = document.begun(notebook)
            if run is not None and run != told:  # that of an earlier run gives way to this one's
                with atomic_write.beside(path) as other:
                    other.write_text(json.dumps({"run": run, "failure": failure}))
                    atomic_write.move(other, path)
                told = run
            elif told is not None and taken:
                break
            time.sleep(TURN_SECONDS)
        path.unlink(missing_ok=True)


def listen(notebook: pathlib.Path, run: str, hear: Callable[[dict[str, Any]], None]) -> None:
    """Hears of failures of other ranks, in a thread, to the end of the process.

    Args:
        notebook: the file that this rank writes, and has written.
        run: when its run began, as the notebook says.
        hear: is called with each failure; until it has returned the other rank waits.
    """

    def look() -> None:
        while True:
            time.sleep(TURN_SECONDS)
            for path in _told(notebook):
                told = json.loads(path.read_text())
                if told.get("run") == run:
                    hear(told["failure"])
                path.unlink(missing_ok=True)

    threading.Thread(target=look, name="keras_dist notebook", daemon=True).start()


def _told(notebook: pathlib.Path) -> list[pathlib.Path]:
    return sorted(notebook.parent.glob(f"{glob.escape(_path(notebook, '').name)}*"))


def _path(notebook: pathlib.Path, rank: str) -> pathlib.Path:
    return notebook.with_name(f".{notebook.name}.failed-{rank}")
