"""The thread that writes the part of a rank, and on the root the manifest. Calls no MPI.

The ranks say through the file system that their parts are whole: a part appears under its name when
it is. So a generation becomes whole while training continues, whatever the ranks wait for.
"""

import contextlib
import logging
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist import errors, runtime
from keras_dist.resume import format
from keras_dist.resume.tensor_file import Tensor

# Caches of network file systems may hide a new file from the root for some time.
VISIBLE_SECONDS = 60.0
NAP_SECONDS = (0.01, 0.5)  # between looks, growing
SHARED = "Choose a directory that all ranks share, and that they can write to."

_log = logging.getLogger("keras_dist")


class Writer:
    """Writes one generation in a thread, which starts at once."""

    def __init__(
        self,
        directory: pathlib.Path,
        number: int,
        place: tuple[int, int],
        tensors: Sequence[Tensor],
        about: Mapping[str, Any] | None,
        keep: int,
        previous: int | None = None,
    ):
        self.number = number
        self._directory, self._place, self._tensors = directory, place, tensors
        self._about, self._keep, self._previous = about, keep, previous
        self._owner = threading.current_thread()  # the thread that trains
        self._written, self._ended, self._gives_up = (threading.Event() for _ in range(3))
        self._failure: OSError | None = None  # of the part or the manifest
        self._part_failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="keras_dist checkpoint")
        self._thread.start()

    def wait_for_part(self) -> OSError | None:
        """Waits until the part of this rank is written; returns the failure, if it has failed."""
        self._written.wait()
        return self._part_failure

    def finish(self, are_whole: bool) -> OSError | None:
        """Ends the generation: on the root, waits for the manifest. Returns the failure, if any."""
        self._ended.wait(VISIBLE_SECONDS if are_whole else 0)
        self._gives_up.set()
        self._thread.join()
        return self._failure

    def discard(self) -> None:
        """Removes the parts of the generation, if it has ended without a manifest."""
        format.discard(self._directory, self.number)

    def is_whole(self) -> bool:
        """Returns whether the generation has a manifest, as far as this rank can see."""
        with contextlib.suppress(OSError):
            return format.is_committed(self._directory, self.number)
        return False

    def _run(self) -> None:
        """Writes; logs a failure that nobody asks for, as `fit` has raised for another reason."""
        self._attempt(self._write_part)
        self._part_failure = self._failure
        self._written.set()
        if self._about is not None and self._failure is None:
            self._attempt(self._commit)
        self._ended.set()
        while self._failure is not None and not self._gives_up.wait(NAP_SECONDS[1]):
            if not self._owner.is_alive():
                text = "%s keras_dist: the last checkpoint in %s has failed: %s"
                _log.warning(text, runtime.where(), self._directory, self._failure)
                return

    def _attempt(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # raised in the training thread
            text = f"{type(error).__name__}: {error}"
            self._failure = error if isinstance(error, OSError) else errors.CheckpointError(text)

    def _write_part(self) -> None:
        format.write_part(self._directory, self.number, *self._place, self._tensors)

    def _commit(self) -> None:
        parts = self._wait_for_all(self._place[1])
        about = self._about or {}
        format.commit(self._directory, self.number, parts, about, self._keep, self._previous)

    def _wait_for_all(self, size: int) -> list[pathlib.Path]:
        """Returns the parts of all ranks when they are whole."""
        nap, longest = NAP_SECONDS
        ended_at = None  # the thread that trains
        while len(parts := format.parts_of(self._directory, self.number, size)) < size:
            if ended_at is None and not self._owner.is_alive():
                ended_at = time.monotonic()
            late = ended_at is not None and time.monotonic() - ended_at > VISIBLE_SECONDS
            if self._gives_up.wait(nap) or late:
                expected = f"the parts of {size} ranks in {self._directory}/{self.number:08d}"
                received = f"{len(parts)}, seen by this rank"
                raise errors.CheckpointError(runtime.where(), expected, received, SHARED)
            nap = min(2 * nap, longest)
        return parts
