"""Objects of keras_dist as messages to other ranks, errors among them."""

import io
import pickle
from typing import Any


class _Pickler(pickle.Pickler):
    """Pickles exceptions as their classes define it, whatever other packages register for them.

    `tblib`, which Dask imports, registers a reducer that adds causes, contexts and tracebacks. An
    error in an argument has any cause, also one that cannot be pickled, and other ranks need the
    text alone.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def as_message(value: Any) -> bytes:
    """Returns an object pickled for other ranks, which read it with `pickle.loads`."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
