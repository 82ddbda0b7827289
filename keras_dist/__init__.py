"""keras_dist: runs Keras training written for one process synchronously on many processes.

```python
import keras_dist

keras_dist.init()
optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01 * keras_dist.size()))
model.compile(optimizer=optimizer, loss="mse")
model.fit(keras_dist.data.shard(dataset), callbacks=keras_dist.callbacks())
```

The public names are listed in `__init__.pyi`. They are imported on first use, so that importing
keras_dist imports no framework.
"""

from typing import Any

import lazy_loader

from keras_dist import monitor
from keras_dist.runtime import exit_hooks, launch_environment

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_REMOVED = {"Pipeline": "Use send and recv, as examples/model_parallel does."}

monitor.subscribe()
# Under a launcher, threads and exit hooks must be set up before keras_dist is used.
launch_environment.limit_threads()
if launch_environment.starts_ranks():
    exit_hooks.install()


def __getattr__(name: str) -> Any:
    if name in _REMOVED:
        raise AttributeError(f"keras_dist.{name} has been removed. {_REMOVED[name]}")
    globals()[name] = value = _load(name)
    return value
