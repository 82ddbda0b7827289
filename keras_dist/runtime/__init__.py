"""The job of this process: its ranks, its process sets, its start and its end.

The names are those of `__init__.pyi`. They are imported when they are used: `keras_dist` sizes
thread pools before numpy is imported.
"""

from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    globals()[name] = value = _load(name)
    return value
