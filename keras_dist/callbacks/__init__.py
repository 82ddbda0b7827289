"""Keras callbacks for distributed training. The package is callable and returns the usual list.

```python
model.fit(dataset, callbacks=keras_dist.callbacks())
model.fit(dataset, callbacks=keras_dist.callbacks(keras.callbacks.EarlyStopping("loss")))
```

The order of callbacks matters. `keras_dist.callbacks()` returns them in this order:

1. `RootConsoleCallback`: configures output before Keras' progress bar starts.
2. `BroadcastGlobalVariablesCallback`: makes weights equal before other callbacks read them.
   `VerifyBatches`: checks the batch of the first step.
3. `UnevenDataCallback`: lets all ranks finish the steps of an epoch before other callbacks
   run collectives.
4. `AverageStatisticsCallback`: makes statistics equal before validation and checkpoints.
5. `MetricAverageCallback`: later callbacks see metrics of all ranks and decide alike.
6. `GoOnWithoutLostRanks`, optional: prints averaged metrics.
7. `Throughput`, optional: reduces its own numbers, therefore after the averaging.
8. `ProgressCallback`: publishes progress to `keras-dist top`.
9. `LearningRateWarmupCallback`, optional: before the user's schedules, which may take over
   after the warmup.
10. The user's callbacks.
11. `ModelCheckpoint`, optional: writes the state after all callbacks above.
12. `VerifyReplicas`: checks the replicas at the end of `fit`.
13. `AgreeOnStoppingCallback`: after all callbacks that may stop training. It synchronizes after
   every batch if one of the user's callbacks may stop training there, otherwise once an epoch.
14. `PreemptionCallback`: last, because it may end the job.

Callbacks may also be appended to the list, on all ranks or on some. `fit` moves the last three
behind appended callbacks and also synchronizes after every batch if an appended callback may stop
training there.
"""

import sys
import types
from typing import Any

import keras

from keras_dist import config, errors
from keras_dist.callbacks.backup import BackupAndRestore, ShardedCheckpoint
from keras_dist.callbacks.broadcast import BroadcastGlobalVariablesCallback
from keras_dist.callbacks.checkpoint import BestModelCheckpoint, ModelCheckpoint
from keras_dist.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from keras_dist.callbacks.metrics import MetricAverageCallback
from keras_dist.callbacks.missing_ranks import (
    GoOnWithoutLostRanks,
    UnevenDataCallback,
    check_share_out,
)
from keras_dist.callbacks.root import RootConsoleCallback, RootOnly
from keras_dist.callbacks.stopping import (
    AgreeOnStoppingCallback,
    PreemptionCallback,
    may_stop_at_a_batch,
)
from keras_dist.callbacks.throughput import ProgressCallback, Throughput, WriteScalars
from keras_dist.callbacks.verification import (
    AverageStatisticsCallback,
    VerifyBatches,
    VerifyReplicas,
)
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.session_callback import SessionCallback

__all__ = [
    "AgreeOnStoppingCallback",
    "AverageStatisticsCallback",
    "BackupAndRestore",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "GoOnWithoutLostRanks",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelCheckpoint",
    "PreemptionCallback",
    "ProgressCallback",
    "RootConsoleCallback",
    "RootOnly",
    "ShardedCheckpoint",
    "Throughput",
    "UnevenDataCallback",
    "VerifyBatches",
    "VerifyReplicas",
    "WriteScalars",
    "callbacks",
]


def callbacks(
    *others: keras.callbacks.Callback,
    root_rank: int = 0,
    warmup_epochs: float = 0,
    initial_lr: float | None = None,
    checkpoint: str | None = None,
    throughput: bool = False,
    uneven: str = "continue",
    on_failure: str | None = None,
    share_out: str = "next epoch",
    verbose: int = 0,
    process_set: ProcessSet | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks for distributed training, in the right order.

    `keras_dist.callbacks(...)` is short for `keras_dist.callbacks.callbacks(...)`.

    Args:
        *others: user callbacks. They receive metrics of all ranks. If one of them stops
            training on any rank, all ranks stop after the same step.
        root_rank: rank whose initial weights are broadcast, and that writes files and prints.
            Defaults to 0.
        warmup_epochs: number of epochs in which the learning rate grows to `initial_lr`.
            Defaults to 0, no warmup.
        initial_lr: target learning rate of the warmup, already scaled by `size()`. Required
            if `warmup_epochs` is not 0. Defaults to `None`.
        checkpoint: path of the model file to write after each epoch, see `ModelCheckpoint`.
            Defaults to `None`, no checkpoints.
        throughput: whether the logs of each epoch contain samples per second of all ranks and
            the time that ranks waited for each other, see `Throughput`. Defaults to `False`.
        uneven: behavior if a rank runs out of data before others: `"continue"`, `"stop"` or
            `"error"`, see `UnevenDataCallback`. Defaults to `"continue"`.
        on_failure: behavior if a rank dies. `"continue"`: the remaining ranks go on, see
            `GoOnWithoutLostRanks`. `"stop"`: the job ends. Defaults to `None`, the value of
            `KERAS_DIST_ON_FAILURE`, or `"stop"` if it is not set.
        share_out: as for `GoOnWithoutLostRanks`: only `"next epoch"`, the default, is left.
        verbose: 1 prints a line at the end of the warmup and at each checkpoint, on the root.
            Defaults to 0.
        process_set: the ranks that train together, to which each rank that calls `fit` must
            belong: it averages, broadcasts, stops and saves within the set, so that sets train
            different models at the same time. The optimizer needs the same `process_set`. The
            first rank of the set is the root in place of rank 0. Files of sets need different
            paths. Defaults to all ranks.

    Returns:
        A flat list of callbacks for `fit`, `evaluate` or `predict`.

    Raises:
        ArgumentError: `warmup_epochs` is given without `initial_lr`; `uneven`, `on_failure` or
            `share_out` is unknown; `root_rank` is not 0, or there is a `process_set`, with another
            `on_failure` than `"stop"`; this rank or the root is not in `process_set`.
        ArgumentTypeError: one of `others` is not a callback of Keras.
    """
    check_share_out(share_out)
    for each in others:
        if not isinstance(each, keras.callbacks.Callback | keras.callbacks.CallbackList):
            raise errors.ArgumentTypeError(
                "instances of keras.callbacks.Callback",
                f"{each!r} of type {type(each).__name__}",
                "Pass callbacks one by one: keras_dist.callbacks(first, second), or *those of a "
                "list.",
            )
    made: list[keras.callbacks.Callback] = [
        RootConsoleCallback(root_rank),
        BroadcastGlobalVariablesCallback(root_rank),
        VerifyBatches(root_rank),
        UnevenDataCallback(uneven),
        AverageStatisticsCallback(),
        MetricAverageCallback(root_rank=root_rank),
    ]
    if _goes_on(on_failure, root_rank, process_set):
        made.append(GoOnWithoutLostRanks())
    if throughput:
        made.append(Throughput())
    made.append(ProgressCallback())
    if warmup_epochs:
        if initial_lr is None:
            raise errors.ArgumentError(
                "initial_lr together with warmup_epochs",
                "initial_lr=None",
                "Pass the target learning rate, for example 0.01 * keras_dist.size().",
            )
        made.append(LearningRateWarmupCallback(initial_lr, warmup_epochs, verbose=verbose))
    made.extend(others)
    if checkpoint is not None:
        made.append(ModelCheckpoint(checkpoint, verbose=verbose, root_rank=root_rank))
    made.append(VerifyReplicas(every=None, root_rank=root_rank))
    made.append(AgreeOnStoppingCallback(may_stop_at_a_batch(others)))
    made.append(PreemptionCallback(root_rank=root_rank))
    if process_set is not None:
        for callback in made:
            if isinstance(callback, SessionCallback):
                # A callback of the user may take part in another fit, of other ranks.
                is_own = callback in others
                (callback.root_within if is_own else callback.train_within)(process_set)
    return made


def _goes_on(on_failure: str | None, root_rank: int, process_set: ProcessSet | None) -> bool:
    choice = on_failure or config.settings().on_failure
    if choice not in ("stop", "continue"):
        expected = "on_failure to be 'stop', 'continue' or None"
        remedy = "Omit on_failure to end the job when a rank dies."
        if choice == "replace":
            remedy = f"Omit it: {config.START_AGAIN}"
    elif choice != "stop" and root_rank != 0:
        expected, choice = f"root_rank=0 with on_failure={choice!r}", f"root_rank={root_rank}"
        remedy = "Use root_rank=0: when a rank dies, the remaining ranks are renumbered from 0."
    elif process_set is not None and choice != "stop":
        expected = "on_failure='stop' with a process_set"
        remedy = "Omit on_failure: the job ends when a rank dies, and keras-dist run restarts it."
    else:
        return choice == "continue"
    raise errors.ArgumentError(expected, repr(choice), remedy)


class _CallablePackage(types.ModuleType):
    """Makes the package callable: `keras_dist.callbacks(...)` returns the list of callbacks."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[keras.callbacks.Callback]:
        return callbacks(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        text = f"module {self.__name__!r} has no attribute {name!r}."
        if name in dir(keras.callbacks.Callback):
            text += " Pass what it returns to fit: callbacks=keras_dist.callbacks()."
        if name == "AdmitRanks":
            text += f" Ranks do not join a job that runs. {config.START_AGAIN}"
        raise AttributeError(text)


sys.modules[__name__].__class__ = _CallablePackage
