"""The data of a job, shared out over its ranks: `shard`, and a function for each kind of files.

The names are those of `__init__.pyi`. They are imported when they are used: no framework before
data of it comes in.
"""

from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    globals()[name] = value = _load(name)
    return value
