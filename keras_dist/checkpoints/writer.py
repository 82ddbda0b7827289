"""The thread that writes the part of a rank, and on the root the manifest. Calls no MPI.

The ranks say through the file system that their parts are whole: a part appears under its name when
it is. So a checkpoint becomes whole while training continues, whatever the ranks wait for.
"""

import contextlib
import logging
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist import errors, runtime
from keras_dist.storage import generations
from keras_dist.storage.tensor_file import Tensor

# Caches of network file systems may hide a new file from the root for some time.
VISIBLE_SECONDS = 60.0
NAP_SECONDS = (0.01, 0.5)  # between looks, growing
SHARED = "Choose a directory that all ranks share, and that they can write to."

_log = logging.getLogger("keras_dist")


class Writer:
    """Writes generations in a thread, one at a time."""

    def __init__(self, directory: pathlib.Path, keep: int):
        self._directory, self._keep = directory, keep
        self._thread: threading.Thread | None = None
        self._written = threading.Event()  # this rank's part is whole, or has failed
        self._ended = threading.Event()  # the manifest, or the part of another rank, as well
        self._gives_up = threading.Event()
        self._owner = threading.current_thread()  # the thread that trains
        self._part_failure: OSError | None = None
        self._failure: OSError | None = None  # of the part or the manifest
        self.number = 0  # of the generation, the same on all ranks

    def start(
        self,
        number: int,
        place: tuple[int, int],
        tensors: Sequence[Tensor],
        about: Mapping[str, Any] | None,
        previous: int | None = None,
    ) -> None:
        """Starts to write the part of this rank."""
        self.number, self._part_failure, self._failure = number, None, None
        self._owner = threading.current_thread()
        for event in (self._written, self._ended, self._gives_up):
            event.clear()
        self._thread = threading.Thread(
            target=self._run, args=(*place, tensors, about, previous), name="keras_dist checkpoint"
        )
        self._thread.start()

    def wait_for_part(self) -> OSError | None:
        """Waits until the part of this rank is written; returns the failure, if it has failed."""
        if self._thread is not None:
            self._written.wait()
        return self._part_failure

    def finish(self, are_whole: bool) -> OSError | None:
        """Ends the generation: on the root, waits for the manifest.

        Returns:
            The failure of this rank, `None` if there was none or nothing was started.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        self._ended.wait(VISIBLE_SECONDS if are_whole else 0)
        self._gives_up.set()
        thread.join()
        return self._failure

    def discard(self) -> None:
        """Removes the parts of the generation, if it has ended without a manifest."""
        generations.discard(self._directory, self.number)

    def is_whole(self) -> bool:
        """Returns whether the generation has a manifest, as far as this rank can see."""
        with contextlib.suppress(OSError):
            return generations.is_committed(self._directory, self.number)
        return False

    def _run(self, *arguments: Any) -> None:
        """Writes; logs a failure that nobody asks for, as `fit` has raised for another reason."""
        self._write(*arguments)
        self._ended.set()
        while self._failure is not None and not self._gives_up.wait(NAP_SECONDS[1]):
            if not self._owner.is_alive():
                text = "%s keras_dist: the last checkpoint in %s has failed: %s"
                _log.warning(text, runtime.where(), self._directory, self._failure)
                return

    def _write(
        self,
        rank: int,
        size: int,
        tensors: Sequence[Tensor],
        about: Mapping[str, Any] | None,
        previous: int | None,
    ) -> None:
        try:
            generations.write_part(self._directory, self.number, rank, size, tensors)
            self._written.set()
            if about is not None:
                parts = self._wait_for_all(size)
                generations.commit(self._directory, self.number, parts, about, self._keep, previous)
        except Exception as error:  # raised in the training thread
            text = f"{type(error).__name__}: {error}"
            self._failure = error if isinstance(error, OSError) else errors.CheckpointError(text)
            if not self._written.is_set():
                self._part_failure = self._failure
                self._written.set()

    def _wait_for_all(self, size: int) -> list[pathlib.Path]:
        """Returns the parts of all ranks when they are whole."""
        nap, longest = NAP_SECONDS
        ended_at = None  # the thread that trains
        while len(parts := generations.parts_of(self._directory, self.number, size)) < size:
            if ended_at is None and not self._owner.is_alive():
                ended_at = time.monotonic()
            late = ended_at is not None and time.monotonic() - ended_at > VISIBLE_SECONDS
            if self._gives_up.wait(nap) or late:
                raise errors.CheckpointError(
                    runtime.where(),
                    f"the parts of {size} ranks in {self._directory / f'{self.number:08d}'}",
                    f"{len(parts)}, seen by this rank",
                    SHARED,
                )
            nap = min(2 * nap, longest)
        return parts
