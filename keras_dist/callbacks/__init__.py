"""Keras callbacks for training on many ranks; the package itself gives the usual list.

```python
model.fit(dataset, callbacks=keras_dist.callbacks())
model.fit(dataset, callbacks=keras_dist.callbacks(keras.callbacks.EarlyStopping("loss")))
```

Their order matters, and `keras_dist.callbacks()` keeps it:

1. `RootConsoleCallback`: before Keras' own progress bar is told how to print.
2. `BroadcastGlobalVariablesCallback`: equal weights before anything looks at them.
   `VerifyBatches` beside it: what it looks at is the batch of the first step.
3. `UnevenDataCallback`: all ranks at the end of an epoch's steps, before anything else meets.
4. `AverageStatisticsCallback`: equal statistics before validation and checkpoints use them.
5. `MetricAverageCallback`: from here on every callback sees the metrics of all ranks, so
   those that decide by them decide alike.
6. `GoOnWithoutLostRanks`, when asked for: it prints what all ranks have averaged.
7. `Throughput`, when asked for: it speaks for all ranks by itself, so after the averaging.
8. `ProgressCallback`: what `keras-dist top` shows.
9. `LearningRateWarmupCallback`, when asked for: before the user's own schedules, which may
   take over after it.
10. the user's callbacks.
11. `ModelCheckpoint`, when asked for, so that it writes what all others have done.
12. `VerifyReplicas`, at the end of the fit alone: it sees what all others have left.
13. `AgreeOnStoppingCallback`: behind those that may stop training. It asks them after every
   batch where one of the user's callbacks may stop there, else once an epoch.
14. `PreemptionCallback`: last, so that everything else is done when it ends the job.

Callbacks may also be appended to the list, on all ranks or on some. `fit` moves the last three
behind them, and asks them after every batch where one of them may stop training there.
"""

import sys
import types
from typing import Any

import keras

from keras_dist import config, errors, runtime
from keras_dist.callbacks.backup import BackupAndRestore
from keras_dist.callbacks.batches import VerifyBatches
from keras_dist.callbacks.broadcast import BroadcastGlobalVariablesCallback
from keras_dist.callbacks.checkpoint import BestModelCheckpoint, ModelCheckpoint
from keras_dist.callbacks.console import RootConsoleCallback
from keras_dist.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from keras_dist.callbacks.metrics import MetricAverageCallback
from keras_dist.callbacks.preemption import PreemptionCallback
from keras_dist.callbacks.progress import ProgressCallback
from keras_dist.callbacks.root import RootOnly
from keras_dist.callbacks.scalars import WriteScalars
from keras_dist.callbacks.statistics import AverageStatisticsCallback
from keras_dist.callbacks.stopping import AgreeOnStoppingCallback, may_stop_at_a_batch
from keras_dist.callbacks.survival import GoOnWithoutLostRanks
from keras_dist.callbacks.throughput import Throughput
from keras_dist.callbacks.uneven import UnevenDataCallback
from keras_dist.callbacks.verification import VerifyReplicas

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
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that training on many ranks needs, in the right order.

    `keras_dist.callbacks(...)` is short for `keras_dist.callbacks.callbacks(...)`.

    Args:
        *others: the user's own callbacks; they see metrics of all ranks, and when one of them
            stops training on any rank, all ranks stop after the same step.
        root_rank: the rank whose weights all start with, and the one that writes and
            prints. Defaults to 0.
        warmup_epochs: epochs in which the learning rate grows to `initial_lr`. Defaults
            to 0, no warmup.
        initial_lr: the learning rate to reach, the one already scaled by `size()`. Needed
            for a warmup.
        checkpoint: path of the model to write after each epoch, see `ModelCheckpoint`.
            Defaults to `None`, none.
        throughput: whether the logs of each epoch tell how many samples all ranks trained on in
            a second and how long they waited for each other, see `Throughput`. Defaults to
            `False`.
        uneven: what happens when a rank is out of data before others: `"continue"`, `"stop"` or
            `"error"`, see `UnevenDataCallback`. Defaults to `"continue"`.
        on_failure: `"continue"`: the other ranks go on when one dies, see `GoOnWithoutLostRanks`;
            `"stop"`: the job ends. Defaults to `None`: what `KERAS_DIST_ON_FAILURE` says, `"stop"`
            unless it is set.
        share_out: when the others take over the data of a rank that has died: `"next epoch"` or
            `"at once"`, see `GoOnWithoutLostRanks`. Defaults to `"next epoch"`.
        verbose: 1 prints the end of the warmup and each checkpoint, on the root.

    Returns:
        A flat list for `fit`, `evaluate` or `predict`.

    Raises:
        ArgumentError: a warmup without `initial_lr`, or no such `uneven` or `on_failure`; another
            root than rank 0 where ranks go on without those that die.
    """
    made: list[keras.callbacks.Callback] = [
        RootConsoleCallback(root_rank),
        BroadcastGlobalVariablesCallback(root_rank),
        VerifyBatches(root_rank),
        UnevenDataCallback(uneven),
        AverageStatisticsCallback(),
        MetricAverageCallback(root_rank=root_rank),
    ]
    if _goes_on(on_failure, root_rank):
        made.append(GoOnWithoutLostRanks(share_out=share_out))
    if throughput:
        made.append(Throughput())
    made.append(ProgressCallback())
    if warmup_epochs:
        if initial_lr is None:
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    "initial_lr together with warmup_epochs",
                    "initial_lr=None",
                    "Pass the learning rate to reach, for example 0.01 * keras_dist.size().",
                )
            )
        made.append(LearningRateWarmupCallback(initial_lr, warmup_epochs, verbose=verbose))
    made.extend(others)
    if checkpoint is not None:
        made.append(ModelCheckpoint(checkpoint, verbose=verbose, root_rank=root_rank))
    made.append(VerifyReplicas(every=None, root_rank=root_rank))
    made.append(AgreeOnStoppingCallback(may_stop_at_a_batch(others)))
    backups = [one for one in others if isinstance(one, BackupAndRestore)]
    made.append(PreemptionCallback(backups, root_rank))
    return made


def _goes_on(on_failure: str | None, root_rank: int) -> bool:
    choice = on_failure or config.settings().on_failure
    if choice not in ("stop", "continue"):
        expected = "on_failure to be 'stop', 'continue' or None"
        remedy = "Leave it out to end the job when a rank dies."
    elif choice == "continue" and root_rank != 0:
        expected, choice = "root_rank=0 with on_failure='continue'", f"root_rank={root_rank}"
        remedy = "The ranks are numbered anew when one dies, and rank 0 is then the next."
    else:
        return choice == "continue"
    raise errors.ArgumentError(errors.explain(runtime.where(), expected, repr(choice), remedy))


class _CallablePackage(types.ModuleType):
    """A module that can be called, so that `keras_dist.callbacks` is list and package."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[keras.callbacks.Callback]:
        return callbacks(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
