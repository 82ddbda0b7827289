"""Times the steps of a saved Keras model on the ranks of a job, without communication.

The job of `keras-dist bench --model FILE --batch-size N`. Ranks train on random data at the same
time, so that ranks of a node share its cores and its memory as they do in a real job. The root
prints the durations as one line of JSON.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from keras_dist import _engine, runtime

WARM_STEPS = 4
STEPS = 20


def main() -> None:
    """Measures on every rank.

    The command line holds a prefix for the line of JSON, the path of the model and the batch size.
    """
    import keras

    mark, path, batch_size = sys.argv[1:]
    runtime.init()
    comm = runtime.communicator()
    model = keras.saving.load_model(path)
    inputs, targets = random_batch(model, int(batch_size), comm.rank)
    clock = _clock()
    steps = WARM_STEPS + STEPS
    _engine.collectives.barrier(comm)
    model.fit(
        *(_repeated(arrays, steps) for arrays in (inputs, targets)),
        batch_size=int(batch_size),
        shuffle=False,
        verbose=0,
        callbacks=[clock],
    )
    durations = np.diff(clock.times)[WARM_STEPS - 1 :].tolist()
    everywhere = _engine.collectives.allgather_object(comm, durations)
    if comm.rank == 0:
        print(mark + json.dumps({"durations": everywhere}), flush=True)


def random_batch(model: Any, count: int, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Returns random inputs and targets of a compiled model, as lists of arrays.

    Integers are 0 or 1, which every embedding and every classifier has.
    """
    import keras

    random = np.random.default_rng(seed)

    def array(shape: Any, dtype: str) -> np.ndarray:
        sizes = (count, *(1 if size is None else size for size in shape[1:]))
        if "int" in dtype or dtype == "bool":
            return random.integers(0, 2, sizes).astype(dtype)
        return random.random(sizes, np.float32).astype(dtype)

    losses = keras.tree.flatten(model.loss)
    inputs = [array(tensor.shape, str(tensor.dtype)) for tensor in model.inputs]
    targets = []
    for number, tensor in enumerate(model.outputs):
        loss = losses[min(number, len(losses) - 1)]
        name = str(getattr(loss, "name", getattr(loss, "__name__", loss)))
        is_class = name.startswith("sparse")
        shape = tensor.shape[:-1] if is_class else tensor.shape
        targets.append(array(shape, "int32" if is_class else "float32"))
    return inputs, targets


def _repeated(arrays: list[Any], times: int) -> Any:
    """Returns arrays of as many batches, as `fit` takes them."""
    repeated = [np.concatenate([array] * times) for array in arrays]
    return repeated[0] if len(repeated) == 1 else repeated


def _clock() -> Any:
    """Returns a callback that takes the time after each step."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # JAX is ahead of its results
            self.times.append(time.perf_counter())

    return Clock()


if __name__ == "__main__":
    main()
