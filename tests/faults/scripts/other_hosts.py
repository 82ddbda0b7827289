"""Jobs that go on with other hosts. The first start is slow, so that the hosts change meanwhile."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from faults import FOLDER, die, fault, run

IS_FIRST = os.environ["KERAS_DIST_RESTART"] == "0"


def wait(after: int) -> None:
    """Waits for the launcher in each step of the first start; `after` steps the hosts change."""
    if IS_FIRST and after >= 0:
        if after == 0:
            fault()
        (FOLDER / "trains").touch()
        time.sleep(0.5)


def linear() -> tuple[Any, Any, Any]:
    """Returns a model, the same global batches for any number of ranks, and a callback."""
    import keras
    from fits import At

    import keras_dist

    x = np.random.default_rng(0).standard_normal((48, 6)).astype("float32")
    data = keras_dist.data.shard((x, x[:, :1]), global_batch_size=12, shuffle=False)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "linear", False)])
    model.layers[0].set_weights([np.zeros((6, 1), "float32")])
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(keras_dist.DistributedOptimizer(sgd), "mse")

    class Slow(At):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)
            wait(len(self.steps) - 5)

    return model, data, Slow()


def fit(backup: str) -> None:
    """Trains with a backup; with `"parts"` a fit without one comes first, which is not stopped."""
    model, data, slow = linear()
    import keras_dist

    rank, folder = keras_dist.rank(), os.environ.get("BACKUP", FOLDER / "backup")
    ours: Any = keras_dist.callbacks
    if backup == "memory":
        made = ours.BackupAndRestore(folder, root_rank=1, memory=True)
    else:
        made = ours.ShardedCheckpoint(folder)
        if IS_FIRST:
            model.fit(data, epochs=5, verbose=0, callbacks=ours(slow))
            (FOLDER / "not stopped").touch()
            model, data, slow = linear()
    try:
        model.fit(data, epochs=8, verbose=0, callbacks=ours(slow, made))
    finally:
        if rank == 0:
            steps = [4 * epoch + batch for epoch, batch in slow.steps]
            with (FOLDER / "steps").open("a") as file:
                file.write(f"{keras_dist.size()}: {steps}\n")
    if rank == 0:
        np.save(FOLDER / "weights", model.get_weights()[0])


def elastic_fit() -> None:
    """As scripts for Horovod do, with the callbacks that commit."""
    model, data, slow = linear()
    import keras_dist
    from keras_dist import elastic

    state: Any = elastic.KerasState(model, epoch=0, batch=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(keras_dist.size())])
    callbacks = [
        slow,
        elastic.UpdateBatchStateCallback(state),
        elastic.UpdateEpochStateCallback(state),
        elastic.CommitStateCallback(state, batches_per_commit=2),
    ]

    @elastic.run
    def train(state: Any) -> None:
        ours = keras_dist.callbacks(*callbacks)  # type: ignore[operator]
        state.model.fit(data, initial_epoch=state.epoch, epochs=8, verbose=0, callbacks=ours)

    train(state)
    keras_dist.verify_replicas(model)
    assert resets == ([] if IS_FIRST else [keras_dist.size()]), resets
    # An epoch that was interrupted begins again, with the weights of the commit.
    assert state.epoch == 8 and 32 <= int(model.optimizer.iterations) <= 36, vars(state)
    if keras_dist.rank() == 0:
        print("sizes", keras_dist.size(), flush=True)


def commits(how: str) -> None:
    """Counts steps in a function of `elastic.run`."""
    from bare import runtime

    from keras_dist import elastic, ops
    from keras_dist.storage import memory_directory

    runtime.init()
    directory = FOLDER / "state" if how == "directory" else None
    state: Any = elastic.ObjectState(directory=directory, step=0, total=0.0, sizes=[])
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(runtime.size())])
    if how == "checks":
        runtime.add_process_set([1])

    @elastic.run
    def train(state: Any) -> None:
        while state.step < 30:
            state.total += float(ops.allreduce(1.0))
            state.step += 1
            state.sizes.append(runtime.size())
            wait(state.step - 5)
            if how == "dies" and IS_FIRST and runtime.rank() == 1 and state.step == 7:
                die()
            if how == "checks" and state.step % 10:
                state.check_host_updates()
            else:
                state.commit()

    train(state)
    counts = [(size, state.sizes.count(size)) for size in dict.fromkeys(state.sizes)]
    assert (state.step, state.total) == (30, 30.0), vars(state)
    assert sum(count for _, count in counts) == 30, counts
    assert resets == ([] if IS_FIRST else [runtime.size()]), resets
    if runtime.rank() == 0:
        print("sizes", *(size for size, _ in counts), flush=True)
    ops.barrier()
    left = Path(os.environ.get("KERAS_DIST_MEMORY_DIRECTORY", "/dev/shm"))
    job = memory_directory.directory_of(os.environ["KERAS_DIST_JOB_ID"], Path()).partition("-")[0]
    assert not [*left.glob(f"keras_dist_backups-{os.getuid()}/{job}-*/*.json")]


run(globals())
