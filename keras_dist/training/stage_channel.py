"""`StageChannel`: messages between neighbouring stages of a pipeline, and the end of a batch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_dist import _engine, errors, runtime

MAX_ERROR_LENGTH = 200  # characters of an error in the message to other stages


class StageChannel:
    """Sends and receives arrays of the current batch to and from the neighbouring stages.

    Messages carry the number of their batch, so that stages in different batches get an error
    instead of each other's samples.
    """

    def __init__(self, *ranks: int | None):
        self._ranks = {rank for rank in ranks if rank is not None}
        self._pending: set[int] = set()  # neighbours with messages of this batch left
        self._batch = -1

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Starts a batch; an error inside ends the batch on the neighbours that wait for it."""
        self._batch += 1  # first, so that all stages count a batch that fails
        self._pending = set(self._ranks)
        try:
            yield
        except errors.RankLostError:
            raise
        except Exception as error:
            self._cancel(error)
            raise

    def send(self, array: Any, peer: int, name: str, last: bool = False) -> None:
        """Sends an array to a neighbour; `last` marks the last message of the batch with it."""
        name = f"batch {self._batch}, {name}"
        with self._track(peer, last):
            _engine.point_to_point.send(runtime.communicator(), np.asarray(array), peer, name, name)

    def recv(self, peer: int, name: str, last: bool = False) -> np.ndarray:
        """Receives an array from a neighbour; `last` marks the last message of the batch."""
        name = f"batch {self._batch}, {name}"
        with self._track(peer, last):
            return _engine.point_to_point.recv(runtime.communicator(), peer, name, name)

    @contextlib.contextmanager
    def _track(self, peer: int, last: bool) -> Iterator[None]:
        try:
            yield
        except errors.ArgumentTypeError:  # raised before the exchange: the neighbour still waits
            raise
        except Exception:  # raised by the exchange: the neighbour no longer waits
            self._pending.discard(peer)
            raise
        if last:
            self._pending.discard(peer)

    def _cancel(self, error: Exception) -> None:
        """Sends an error to the neighbours that still wait for messages of this batch."""
        reason = str(error)
        if not isinstance(error, errors.KerasDistError):
            text = " ".join(str(error).split())[:MAX_ERROR_LENGTH]
            reason = errors.explain(
                runtime.where(),
                f"batch {self._batch} to pass all stages of the pipeline",
                f"{type(error).__name__} ({text})",
                "See the error of that rank.",
            )
        for peer in sorted(self._pending):
            with contextlib.suppress(Exception):  # the first error is the one to raise
                _engine.point_to_point.cancel(runtime.communicator(), peer, reason)
