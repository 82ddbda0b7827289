"""Job lifecycle, imported lazily: `keras_dist` sizes thread pools before numpy is imported."""

from typing import Any

import lazy_loader

from keras_dist import errors

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
errors.where = lambda: _load("where")()  # nobody imports more before an error


def __getattr__(name: str) -> Any:
    globals()[name] = value = _load(name)
    return value
