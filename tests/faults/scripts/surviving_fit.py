"""A `fit` that goes on after the deaths of two of four ranks."""

import itertools
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from faults import FOLDER, die, run
from fits import At, build, rank, shard

import keras_dist

ours: Any = keras_dist.callbacks


class DyingAtTheStart(At):
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if rank == 1:
            die()


def at(names: str) -> None:
    """Two ranks die at the named places."""
    os.chdir(FOLDER)
    train, test, model = shard(), shard(shuffle=False), build((16,))
    samples: list[int] = []
    acts: dict[Any, Any] = {
        ("epoch begin", 3): lambda: samples.append(sum(len(batch[0]) for batch in train))
    }
    if names == "broadcast, checkpoint":
        acting, save = DyingAtTheStart(acts), model.save

        def save_or_die(*arguments: Any, **options: Any) -> None:
            if rank == 0 and Path("saved.keras").exists():
                die()
            save(*arguments, **options)

        model.save = save_or_die
    else:
        deaths = {0: ("batch begin", 1, 2), 2: ("test batch begin", 1, 1)}
        acting = At(acts | ({deaths[rank]: die} if rank in deaths else {}))
    log = ours.RootOnly(keras.callbacks.CSVLogger("log.csv"))
    callbacks = ours(acting, log, checkpoint="saved.keras", on_failure="continue")
    history = model.fit(train, validation_data=test, epochs=4, verbose=2, callbacks=callbacks)
    keras_dist.verify_replicas(model)
    told = keras_dist.allgather_object((history.history, samples[-1]))
    if keras_dist.rank() == 0:
        assert all(each == told[0][0] for each, _ in told)
        assert history.history["loss"][-1] < history.history["loss"][0]
        print("ended", keras_dist.size(), sum(count for _, count in told))
        keras.saving.load_model("saved.keras")
        rows = Path("log.csv").read_text().splitlines()
        assert [row[:2] for row in rows] == ["ep", "0,", "1,", "2,", "3,"]


seen: list[list[float]] = [[]]


class Seeing(keras.Sequential):
    def call(self, x: Any, **options: Any) -> Any:
        seen[-1] += x[:, 0].tolist()
        return super().call(x, **options)


def sharing_out_at_once() -> None:
    x = np.arange(96, dtype="float32")[:, None]
    train = keras_dist.data.shard((x, x), batch_size=2)
    acts: dict[Any, Any] = {("epoch begin", i): lambda: seen.append([]) for i in range(3)}
    deaths = {1: ("batch begin", 1, 3), 0: ("batch begin", 1, 6)}
    acts |= {deaths[rank]: die} if rank in deaths else {}
    model = Seeing([keras.layers.Dense(1)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(1e-9)), "mse")
    callbacks = ours(At(acts), on_failure="continue", share_out="at once")
    model.fit(train, epochs=3, verbose=0, callbacks=callbacks)
    told = keras_dist.allgather_object(seen[-3:])
    epochs = [[*itertools.chain(*parts)] for parts in zip(*told, strict=True)]
    if keras_dist.rank() == 0:
        print("seen", [(len(epoch), len(set(epoch))) for epoch in epochs])


def with_too_few_ranks() -> None:
    acting = At({("batch begin", 1, 2): die} if rank == 1 else {})
    build((4,)).fit(shard(), epochs=3, verbose=0, callbacks=ours(acting, on_failure="continue"))


run(globals())
