"""Training that outlives ranks, as scripts for Horovod's `elastic` have it.

```python
state = keras_dist.elastic.KerasState(model, epoch=0, directory="state")

@keras_dist.elastic.run
def train(state):
    model.fit(dataset, initial_epoch=state.epoch, epochs=10, callbacks=[
        keras_dist.elastic.UpdateEpochStateCallback(state),
        keras_dist.elastic.CommitStateCallback(state, batches_per_commit=100),
    ])

train(state)
```

Ranks leave in place, where MPI allows it (`KERAS_DIST_ON_FAILURE=continue`); they join by a new
start of the job (`keras-dist run --max-restarts`), for which a state is kept in a directory.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keras_dist.elastic.models import (
    KerasState,
    TensorFlowKerasState,
    TensorFlowState,
    TorchState,
)
from keras_dist.elastic.running import HorovodInternalError, HostsUpdatedInterrupt, run
from keras_dist.elastic.state import ObjectState, State

if TYPE_CHECKING:
    from keras_dist.elastic.callbacks import (
        CommitStateCallback,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "TorchState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "ElasticSampler":  # torch alone has it
        return importlib.import_module("keras_dist.elastic.torch_sampler").ElasticSampler
    if name in __all__:
        return getattr(importlib.import_module("keras_dist.elastic.callbacks"), name)
    raise AttributeError(f"module 'keras_dist.elastic' has no attribute {name!r}")
