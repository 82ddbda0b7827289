"""Files written in one go or not at all: at once, or while training goes on.

Knows no callbacks and moves nothing between ranks; whoever writes is the root.
"""

import functools
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import BinaryIO

from keras_dist import errors, runtime
from keras_dist.storage.atomic_write import beside, move

__all__ = [
    "NEEDS_ROOM",
    "BackgroundWriter",
    "write_beside",
]

Save = Callable[[str], None]

HDF5 = ".h5"
#: the remedy where a file cannot be written
NEEDS_ROOM = "Choose a place that the root can write to and that has room."
COPY_NBYTES = 2**23


def write_beside(save: Save, filepath: str, nbytes: int = 0) -> None:
    """Saves to an unguessable name in the same directory, then moves the file to its place.

    Args:
        save: writes the file of a given path.
        filepath: the place, with one of the suffixes that Keras knows.
        nbytes: about how large the file is. HDF5 is not begun where there is less room: on a full
            disk that library ends the process when it closes its file.
    """
    target = pathlib.Path(filepath)
    with beside(target) as path:
        if target.suffix == HDF5:
            _try_room(path, nbytes)
        save(str(path))
        move(path, target)


class BackgroundWriter:
    """Writes files while training goes on, one at a time.

    What is to be written is serialised at once, to the directory of temporary files, which is
    local on most machines; a thread brings it to its place. A failure is told by `wait`.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: tuple[str, Exception] | None = None

    def write(self, save: Save, filepath: str, nbytes: int = 0) -> None:
        """Serialises now and returns; waits for the file before. The arguments: `write_beside`.

        Raises:
            OSError: this file could not be serialised.
        """
        self._join()
        directory = pathlib.Path(tempfile.gettempdir())
        with beside(directory / f"keras_dist-{pathlib.Path(filepath).name}") as local:
            write_beside(save, str(local), nbytes)
            content = open(local, "rb")  # noqa: SIM115, the thread closes it
        # The file has lost its name: whatever ends this process, none remains.
        self._thread = threading.Thread(
            target=self._bring, args=(content, filepath), name="keras_dist checkpoint"
        )
        self._thread.start()

    def wait(self) -> bool:
        """Waits until the last file is at its place; returns whether there was one on its way.

        Raises:
            CheckpointError: it could not be written; its cause is the error itself.
        """
        was_there = self._thread is not None
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            filepath, error = failure
            expected = f"to write the checkpoint {filepath}"
            received = f"{type(error).__name__}: {error}"
            text = errors.explain(runtime.where(), expected, received, NEEDS_ROOM)
            raise errors.CheckpointError(text) from error
        return was_there

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _bring(self, content: BinaryIO, filepath: str) -> None:
        try:
            with content:
                write_beside(functools.partial(_copy, content), filepath)
        except Exception as error:  # whatever it is, it is told in the thread that trains
            self._failure = filepath, error


def _copy(content: BinaryIO, path: str) -> None:
    with open(path, "xb") as file:
        shutil.copyfileobj(content, file, COPY_NBYTES)


def _try_room(path: pathlib.Path, nbytes: int) -> None:
    """Raises where a file of that size has no room."""
    with path.open("xb") as file:
        if nbytes and hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(file.fileno(), 0, nbytes)
