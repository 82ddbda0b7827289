"""Elastic training, for ranks that die and hosts that change. The names are those of Horovod.

```python
state = keras_dist.elastic.KerasState(model, epoch=0)

@keras_dist.elastic.run
def train(state):
    model.fit(dataset, initial_epoch=state.epoch, epochs=10, callbacks=[
        keras_dist.elastic.UpdateEpochStateCallback(state),
        keras_dist.elastic.CommitStateCallback(state, batches_per_commit=100),
    ])

train(state)
```

A job continues without ranks that die if MPI allows it (`KERAS_DIST_ON_FAILURE=continue`).
Otherwise, and with other hosts, `keras-dist run` starts it again from the last commit, which lies
in memory, and with `directory` also on disk.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keras_dist.elastic.model_states import (
    KerasState,
    TensorFlowKerasState,
    TensorFlowState,
    TorchState,
)
from keras_dist.elastic.object_state import ObjectState
from keras_dist.elastic.running import HorovodInternalError, HostsUpdatedInterrupt, State, run

if TYPE_CHECKING:
    from keras_dist.elastic.commit_callbacks import (
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
    if name == "ElasticSampler":  # needs torch
        return importlib.import_module("keras_dist.elastic.torch_sampler").ElasticSampler
    if name in __all__:
        return getattr(importlib.import_module("keras_dist.elastic.commit_callbacks"), name)
    raise AttributeError(f"module 'keras_dist.elastic' has no attribute {name!r}")
