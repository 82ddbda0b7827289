"""Atomic writes of checkpoint files, synchronous or in a background thread. Local to the root."""

import functools
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import BinaryIO

from keras_dist import errors, runtime
from keras_dist.resume.stores import NEEDS_ROOM
from keras_dist.storage.atomic_write import beside, move

Save = Callable[[str], None]

HDF5 = ".h5"
COPY_NBYTES = 2**23


def write_atomically(save: Save, filepath: str, nbytes: int = 0) -> None:
    """Saves to a temporary file with a random name in the same directory, then renames it.

    Args:
        nbytes: estimated size of the file in bytes. Defaults to 0, unknown. An HDF5 file is not
            started without that much free space, because the HDF5 library aborts the process
            when it closes a file on a full disk.
    """
    target = pathlib.Path(filepath)
    with beside(target) as path:
        if target.suffix == HDF5:
            _check_free_space(path, nbytes)
        save(str(path))
        move(path, target)


class BackgroundWriter:
    """Writes files in a background thread, one at a time.

    `write` serialises to the directory of temporary files, which is local on most machines; a
    thread copies the file to its final path. `wait` raises if the copy failed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: tuple[str, Exception] | None = None

    def write(self, save: Save, filepath: str, nbytes: int = 0) -> None:
        """Serialises, after the previous file is written; copies in the background.

        The arguments are those of `write_atomically`.
        """
        self._join()
        directory = pathlib.Path(tempfile.gettempdir())
        with beside(directory / f"keras_dist-{pathlib.Path(filepath).name}") as local:
            write_atomically(save, str(local), nbytes)
            content = open(local, "rb")  # noqa: SIM115, the thread closes it
        # The temporary file is unlinked already: no file remains if this process is killed.
        self._thread = threading.Thread(
            target=self._copy_to, args=(content, filepath), name="keras_dist checkpoint"
        )
        self._thread.start()

    def wait(self) -> bool:
        """Waits until the last file is written; returns whether a write was pending."""
        was_pending = self._thread is not None
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            filepath, error = failure
            expected = f"to write the checkpoint {filepath}"
            received = f"{type(error).__name__}: {error}"
            text = errors.explain(runtime.where(), expected, received, NEEDS_ROOM)
            raise errors.CheckpointError(text) from error
        return was_pending

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _copy_to(self, content: BinaryIO, filepath: str) -> None:
        try:
            with content:
                write_atomically(functools.partial(_copy, content), filepath)
        except Exception as error:  # raised by wait, in the training thread
            self._failure = filepath, error


def _copy(content: BinaryIO, path: str) -> None:
    with open(path, "xb") as file:
        shutil.copyfileobj(content, file, COPY_NBYTES)


def _check_free_space(path: pathlib.Path, nbytes: int) -> None:
    """Creates the file and raises `OSError` if there is no space for `nbytes`."""
    with path.open("xb") as file:
        if nbytes and hasattr(os, "posix_fallocate"):  # not available on macOS
            os.posix_fallocate(file.fileno(), 0, nbytes)
