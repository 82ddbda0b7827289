"""Job lifecycle, imported lazily: `keras_dist` sizes thread pools before numpy is imported."""

from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    globals()[name] = value = _load(name)
    return value
