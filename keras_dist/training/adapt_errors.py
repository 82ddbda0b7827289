"""Errors of `adapt`, raised on every rank."""

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_dist import _engine, errors, runtime


def refused(layer: Any, expected: str, received: str) -> errors.ArgumentError:
    """Returns the error about a layer or its data."""
    remedy = f"Pass data as for {type(layer).__name__}.adapt, and None on ranks without data."
    return errors.ArgumentError(runtime.where(), expected, received, remedy)


@contextlib.contextmanager
def on_every_rank(comm: _engine.Communicator, layer: Any) -> Iterator[None]:
    """Raises an error of this rank on every rank, as an `ArgumentError`; holds no collective."""
    with _engine.collectives.raise_on_all(comm, "adapt"):
        try:
            yield
        except errors.KerasDistError:
            raise
        except Exception as error:  # Keras and readers of data raise errors of several classes
            expected = f"data that the layer {layer.name!r} of {type(layer).__name__} takes"
            raise refused(layer, expected, f"{type(error).__name__}: {error}") from error
