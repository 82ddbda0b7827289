"""Reads generations in a plain process, in which mpi4py cannot be imported.

read_outside.py FOLDER...: each with a backup and checkpoints of the model of test_golden_resume.py.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_dist
from keras_dist.resume import format
from keras_dist.training import model_state

sys.modules["mpi4py"] = None  # type: ignore[assignment]


def make() -> Any:
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(5, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=3),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01, epsilon=0.01), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def digests(model: Any) -> list[str]:
    values = [model_state.to_numpy(variable) for variable in model_state.state(model)]
    values = [value.astype("int64") if value.dtype.kind in "iu" else value for value in values]
    return [hashlib.sha256(value.tobytes()).hexdigest()[:16] for value in values]


def equal(first: Any, second: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


found: dict[str, Any] = {}
for folder in map(Path, sys.argv[1:]):
    for directory in sorted(folder.iterdir()):
        model, again = make(), make()
        assert keras_dist.checkpoints.load(model, directory) == 1
        found[f"{folder.name} {directory.name}"] = digests(model)
        file, weights = (folder / f"{directory.name}{end}" for end in (".keras", ".weights.h5"))
        keras_dist.checkpoints.export(directory, file, model=again)
        keras_dist.checkpoints.export(directory, weights, model=again)
        assert digests(keras.saving.load_model(file)) == digests(model)
        again = make()
        again.load_weights(weights)
        assert equal(again.get_weights(), model.get_weights())
        path = format.newest_first(directory)[0]
        about: Any = format.read(path)
        if "model" in about.about:  # not in a backup of earlier versions
            number = format.number_of(path)
            keras_dist.checkpoints.export(directory, file, generation=number)
            assert digests(keras.saving.load_model(file)) == digests(model)
        try:
            keras_dist.checkpoints.load(model, directory, generation=99)
        except keras_dist.errors.CheckpointError as error:
            assert str(error).startswith("[without MPI] Expected a whole generation"), error
        else:
            raise AssertionError("there is no such generation")
print(json.dumps(found))
