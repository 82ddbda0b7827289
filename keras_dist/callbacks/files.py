"""Files written in one go or not at all: at once, or while training goes on.

Knows no callbacks and moves nothing between ranks; whoever writes is the root.
"""

import functools
import os
import pathlib
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import BinaryIO

from keras_dist import errors, runtime

__all__ = ["NEEDS_ROOM", "BackgroundWriter", "write_beside"]

Save = Callable[[str], None]

SUFFIXES = (".weights.h5", ".keras", ".h5")
#: the remedy where a file cannot be written
NEEDS_ROOM = "Choose a place that the root can write to and that has room."
COPY_NBYTES = 2**23


def write_beside(save: Save, filepath: str) -> None:
    """Saves to an unguessable name in the same directory, then moves the file to its place.

    Args:
        save: writes the file of a given path.
        filepath: the place, with one of the suffixes that Keras knows.
    """
    target = pathlib.Path(filepath)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_suffix(filepath)}")
    try:
        save(str(beside))
        _flush(beside)
        os.replace(beside, target)
        _flush(target.parent)
    finally:
        beside.unlink(missing_ok=True)


class BackgroundWriter:
    """Writes files while training goes on, one at a time.

    What is to be written is serialised at once, to the directory of temporary files, which is
    local on most machines; a thread brings it to its place. A failure is told when the next file
    is written, or by `wait`.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: tuple[str, Exception] | None = None

    def write(self, save: Save, filepath: str) -> None:
        """Serialises now and returns; waits for the file before.

        Args:
            save: writes the file of a given path.
            filepath: the place, with one of the suffixes that Keras knows.

        Raises:
            CheckpointError: the file before could not be written.
        """
        self.wait()
        with tempfile.TemporaryDirectory(prefix="keras_dist-") as directory:
            local = os.path.join(directory, f"checkpoint{_suffix(filepath)}")
            save(local)
            content = open(local, "rb")  # noqa: SIM115, the thread closes it
        # The file has lost its name: whatever ends this process, none remains.
        self._thread = threading.Thread(
            target=self._bring, args=(content, filepath), name="keras_dist checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last file is at its place.

        Raises:
            CheckpointError: it could not be written.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            filepath, error = failure
            expected = f"to write the checkpoint {filepath}"
            received = f"{type(error).__name__}: {error}"
            text = errors.explain(runtime.where(), expected, received, NEEDS_ROOM)
            raise errors.CheckpointError(text) from error

    def _bring(self, content: BinaryIO, filepath: str) -> None:
        try:
            with content:
                write_beside(functools.partial(_copy, content), filepath)
        except Exception as error:  # whatever it is, it is told in the thread that trains
            self._failure = filepath, error


def _copy(content: BinaryIO, path: str) -> None:
    with open(path, "xb") as file:
        shutil.copyfileobj(content, file, COPY_NBYTES)


def _suffix(filepath: str) -> str:
    return next(suffix for suffix in SUFFIXES if filepath.endswith(suffix))


def _flush(path: pathlib.Path) -> None:
    """Makes the system put a file, or the entries of a directory, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
