"""Memory in which the pieces of a rank lie while they are written, copied between two steps."""

import threading
from collections.abc import Sequence

import numpy as np

from keras_dist.checkpoints.pieces import Piece, dtype_of, views_of

ALIGNMENT = 64  # bytes, of each piece


class Stage:
    """Memory that is used again for each checkpoint: new memory costs more than the copy."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._reserving: threading.Thread | None = None

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Makes room for pieces, in a thread, before the first copy needs it."""
        self._wait()
        self._reserving = threading.Thread(
            target=self._grow, args=(_layout(pieces)[1],), name="keras_dist staging", daemon=True
        )
        self._reserving.start()

    def copy(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Copies pieces; the earlier copy must not be in use.

        Returns:
            The bytes of each, flat uint8 arrays, until the next copy.
        """
        self._wait()
        offsets, total = _layout(pieces)
        self._grow(total)
        copies = []
        for value, offset in zip(views_of(pieces), offsets, strict=True):
            target = self._memory[offset : offset + value.nbytes]
            np.copyto(target, value)
            copies.append(target)
        return copies

    def release(self) -> None:
        """Frees the memory."""
        self._wait()
        self._memory = np.empty(0, np.uint8)

    def _wait(self) -> None:
        thread, self._reserving = self._reserving, None
        if thread is not None:
            thread.join()

    def _grow(self, nbytes: int) -> None:
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
            self._memory.fill(0)  # so that the system provides it now


def _layout(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """Returns the offset of each piece, and the size of all, in bytes."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        nbytes = (piece.high - piece.low) * dtype_of(piece.variable).itemsize
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
