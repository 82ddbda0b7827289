"""A `fit` that goes on after the deaths of two of four ranks."""

import os
from pathlib import Path
from typing import Any

import keras
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


def until_they_are_too_few() -> None:
    """Two ranks die within rounds of local steps, and a third one in another fit."""
    for on, delay in (1, 0), (2, 1):
        local_steps = keras_dist.LocalSteps(2, fragments=2, delay=delay)
        optimizer = keras_dist.DistributedOptimizer(
            keras.optimizers.Adam(0.01), local_steps=local_steps
        )
        model = build((16,))
        model.compile(optimizer, "mse")
        acting = At({("batch begin", 1, 1): die} if rank == on else {})
        callbacks = ours(acting, on_failure="continue")
        losses = model.fit(shard(), epochs=4, verbose=0, callbacks=callbacks).history["loss"]
        keras_dist.verify_replicas(model)
        if keras_dist.rank() == 0:
            assert losses[-1] < losses[0]
            print("ended", keras_dist.size(), optimizer._keras_dist.rounds.ended, flush=True)
    acting = At({("batch begin", 1, 2): die} if rank == 3 else {})
    build((4,)).fit(shard(), epochs=3, verbose=0, callbacks=ours(acting, on_failure="continue"))


run(globals())
