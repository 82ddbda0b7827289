"""Faults in `fit`: errors, interrupts, and ranks with different arguments or models."""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras
from faults import FOLDER, break_down, die, fault, run, send, tell
from fits import At, build, fit, rank, shard, x, y

import keras_dist
from keras_dist.errors import CallbackError, DataError, MismatchError

ENDLESS = 10**6


def killed_while_it_computes() -> None:
    fit(At({("epoch begin", 2): threading.Timer(0.1, die).start}, on=1), epochs=ENDLESS)


def callback_raises() -> None:
    fit(At({("epoch end", 0): break_down}, on=1))


def generator_raises() -> None:
    """Its order is not kept by a backup, which is told before the first step."""

    def tell_first() -> None:
        os.write(2, b"first step\n")

    def batches() -> Iterator[Any]:
        for turn in range(8):
            if rank == 1 and turn == 5:
                break_down()
            yield x[:8], y[:8]

    backup = keras_dist.callbacks.BackupAndRestore(FOLDER / "backup")
    fit(backup)
    at = At({("batch begin", 0, 0): tell_first}, on=0)
    fit(backup, at, data=batches(), steps_per_epoch=4)


def pipeline_raises() -> None:
    import tensorflow as tf

    def load(number: Any) -> Any:
        if rank == 1 and number == 5:
            break_down()
        return x[:8]

    data = tf.data.Dataset.range(8).map(lambda n: (tf.py_function(load, [n], tf.float32), y[:8]))
    fit(data=data.map(lambda x, y: (tf.ensure_shape(x, (8, 6)), y)))


def interrupted() -> None:
    def interrupt() -> None:
        fault()
        send("SIGINT")

    fit(At({("epoch begin", 2): interrupt}, on=1), epochs=ENDLESS)


def stopped_on_one_rank() -> None:
    def stop() -> None:
        fault()
        stopping.model.stop_training = True

    stopping = At({("epoch end", 1): stop}, on=1)
    fit(behind=[stopping], epochs=ENDLESS)


class Broken(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise ValueError("broken on purpose")


def different_arguments() -> None:
    stopped_on_one_rank()
    cases: dict[str, dict[str, Any]] = {
        "epochs": {"epochs": 2 + rank},
        "initial_epoch": {"initial_epoch": 1 - rank},
        "validation_data": {"validation_data": (x, y) if rank else None},
        "validation_freq": {"validation_data": (x, y), "validation_freq": 1 + rank},
        "callbacks": {"others": [keras_dist.callbacks.ModelCheckpoint("no.keras")] * rank},
    }
    for name, options in cases.items():
        try:
            fit(*options.pop("others", ()), **options)
        except MismatchError as error:
            tell(rank, name, error)
    try:
        fit(keras_dist.callbacks.RootOnly(Broken()))
    except CallbackError as error:
        tell(rank, error)
    # Root-only callbacks and verbose may differ.
    root_only = [keras.callbacks.CSVLogger(FOLDER / "log.csv")]
    fit(behind=root_only if rank == 0 else (), verbose=2 * rank)
    fault()
    if rank == 0:
        fit()
    else:
        build().fit(x, y, verbose=0)


def different_models() -> None:
    def train(*units: int, samples: int = 8) -> None:
        model, data = build(units), shard(samples, batch_size=4)
        fault()
        fit(data=data, model=model)

    for units, samples in ([4] * (1 + 2 * rank), 8), ([4], 1):
        try:
            train(*units, samples=samples)
        except (MismatchError, DataError) as error:
            tell(f"{rank}: {error}")
    train(4 + rank)


class Slow(keras.callbacks.Callback):
    def on_test_begin(self, logs: Any = None) -> None:
        time.sleep(2.5)


def in_evaluate_or_after_training() -> None:
    def evaluate() -> None:
        build().evaluate(x, y, verbose=0, callbacks=[Slow()])

    def interrupt() -> None:
        fault()
        raise KeyboardInterrupt

    acts = {("epoch begin", 1): evaluate, ("epoch begin", 2): interrupt}
    with contextlib.suppress(KeyboardInterrupt):
        fit(At(acts, on=1), epochs=ENDLESS)


def on_gpus() -> None:
    """For which a test double stands in."""
    model = build((8,))
    try:
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    except Exception as error:
        tell(f"rank {rank} of {keras_dist.size()} raises", *str(error).split())
        raise
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    tell("trained", keras_dist.allgather_object(hashlib.md5(weights).hexdigest()))


run(globals())
