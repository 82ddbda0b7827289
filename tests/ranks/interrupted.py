"""Training that can be interrupted and go on: what test_interruptions.py draws and compares.

A `Way` is a script, a `Run` one attempt of it. Positions are numbers of samples of all ranks since
the first epoch.
"""

import dataclasses
import random
import sys

import keras
import numpy as np
from hypothesis import strategies as st
from interrupting import Interrupted

import keras_dist
from keras_dist.callbacks import (
    BackupAndRestore,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    RootOnly,
    ShardedCheckpoint,
)
from keras_dist.resume import format
from keras_dist.resume.read import look
from keras_dist.training import model_state
from keras_dist.training.session_callback import SessionCallback
from keras_dist.training.sharded_state import whole_value

BACKEND = keras.backend.backend()
SAMPLES, EPOCHS, BATCH = 72, 3, 24
ON_TORCH = ["batches", "loader", "loader with a generator"] if BACKEND == "torch" else []


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train and to go on.

    Args:
        exact: whether all numbers of training are exact in float32, whatever the order of sums:
            any number of ranks, also with another global batch, ends with the same bits. Otherwise
            each rank has random numbers of its own, and callbacks have states.
        data: kind of the training data.
        callback: which one resumes: `"backup"`, `"memory"`, `"parts"`, or `"parts behind"`
            if they are written while training continues.
        save_freq: its argument.
        rate: the callback that sets the learning rate.
        momentum: whether the optimizer of exact training has a state.
        stops: whether `EarlyStopping` restores the best weights.
    """

    exact: bool
    data: str
    callback: str
    save_freq: str | int
    rate: str
    stops: bool
    momentum: bool


def ways(exact):
    """Returns the strategy for a `Way`."""
    data = (
        ["global", "in order"] if exact else ["shard", "global", "arrays", "PyDataset", *ON_TORCH]
    )
    return st.builds(
        Way,
        exact=st.just(exact),
        data=st.sampled_from(data),
        callback=st.sampled_from(["backup", "memory", "parts", "parts behind"]),
        save_freq=st.sampled_from(["epoch", 1, 2]),
        rate=st.just("") if exact else st.sampled_from(["", "warmup", "schedule"]),
        stops=st.just(False) if exact else st.booleans(),
        momentum=st.booleans() if exact else st.just(False),
    )


# --- The training


class Linear(keras.losses.Loss):
    """A loss whose gradients are sums of small integers, divided by a power of two."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(y_true * y_pred, axis=-1)


class Shuffled(keras.utils.PyDataset):
    """Batches that Keras shuffles."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return SAMPLES // BATCH

    def __getitem__(self, index):
        rows = slice(index * len(self.x) // len(self), (index + 1) * len(self.x) // len(self))
        return self.x[rows], self.y[rows]


def new_model(way, seed, sharded=False):
    """Returns the model of a new process, whose weights differ from seed to seed."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    if way.exact:
        layers, loss = [keras.layers.Dense(4, use_bias=False)], Linear(reduction="sum")
        optimizer = keras.optimizers.SGD(2.0**-6, momentum=way.momentum / 2)
    else:
        layers = [
            keras.layers.Dense(5, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=None if BACKEND == "torch" else 3),
            keras.layers.Dense(4),
        ]
        optimizer, loss = keras.optimizers.Adam(0.01), "mse"
    model = keras.Sequential([keras.Input((4,)), *layers])
    if way.exact:
        model.set_weights([np.full(weight.shape, seed) for weight in model.weights])
    wrapped = keras_dist.DistributedOptimizer(optimizer, shard_state=sharded)
    # Tracing takes longest on TensorFlow, and eager steps on JAX.
    model.compile(wrapped, loss, metrics=["mae"], run_eagerly=BACKEND == "tensorflow")
    return model


def data_of(way, batch):
    """Returns the training data as arguments of `fit`; `batch` is that of all ranks."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(-4, 5, (2, SAMPLES, 4)).astype("float32")
    order = {"shard": True, "global": "global", "in order": False}
    if way.data in order:
        data = keras_dist.data.shard((x, y), global_batch_size=batch, shuffle=order[way.data])
        return {"x": data}
    mine = slice(keras_dist.rank(), None, keras_dist.size())
    x, y, share = x[mine], y[mine], batch // keras_dist.size()
    shuffle = {"arrays": True, "batches": "batch"}
    if way.data in shuffle:
        return {"x": x, "y": y, "batch_size": share, "shuffle": shuffle[way.data]}
    if way.data == "PyDataset":
        return {"x": Shuffled(x, y), "shuffle": True}
    import torch

    own = {"generator": torch.Generator().manual_seed(3)} if "generator" in way.data else {}
    arrays = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return {"x": torch.utils.data.DataLoader(arrays, share, shuffle=True, **own)}


def seed_generators(seed):
    """Seeds the generators of this process, differently on each rank."""
    random.seed(seed + keras_dist.rank())
    np.random.seed(seed + keras_dist.rank())
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed + keras_dist.rank())


class Interrupt(SessionCallback):
    """Ends a fit after some batches.

    Args:
        after: number of batches; `None` for no end.
        how: `"before the write"` of the last of them, `"after it"`, or `"at the next epoch"`.
    """

    def __init__(self, after, how):
        super().__init__()
        self.left, self.how = after, how

    def on_epoch_begin(self, epoch, logs=None):
        if self.left is not None and self.left <= 0:
            raise Interrupted

    def on_train_batch_end(self, batch, logs=None):
        if self.left is None:
            return
        self.left -= 1
        if self.left == 0 and self.how == "before the write":
            raise Interrupted
        if self.left == 0 and self.how == "after it":
            self.session.after_hook(self.end)

    def end(self):
        raise Interrupted


class Trajectory(SessionCallback):
    """Keeps the state of this rank after each step, and what was logged; a user's callback."""

    def __init__(self, way, batch):
        super().__init__()
        self.way, self.batch, self.begin, self.states = way, batch, None, {}
        self.seen = {"batches": [], "sums": np.zeros(1)}

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.begin is None:
            self.begin = self.epoch * SAMPLES + batch * self.batch

    def on_train_batch_end(self, batch, logs=None):
        self.at = self.epoch * SAMPLES + (batch + 1) * self.batch
        self.seen["batches"].append(batch)
        self.seen["sums"] = self.seen["sums"] + logs["loss"]
        self.session.after_hook(self.note)

    def note(self):
        self.states[self.at] = state_of(self.model, self.way)

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = {"batches": list(state["batches"]), "sums": state["sums"]}


class Values(keras.callbacks.Callback):
    """Adds a value to the logs of epochs, which is best in the second."""

    def on_epoch_end(self, epoch, logs=None):
        logs["value"] = [0.5, 0.1, 0.3][epoch]


def state_of(model, way):
    """Returns the bytes of the state of this rank. Collective: every rank."""
    if way.exact:
        return [weight.tobytes() for weight in model.get_weights()]
    variables = [*model_state.state(model), *model_state.random_states(model)]
    return [whole_value(variable).tobytes() for variable in variables]


@dataclasses.dataclass
class Run:
    """An attempt: where it began, the states of this rank by position, and its end.

    Args:
        begin: position of the first batch that was trained on; `None` if there was none.
        last: position of the last batch.
        states: states after each batch.
        end: history, states of callbacks and weights; `None` after an interruption.
    """

    begin: int | None
    last: int | None
    states: dict
    end: list | None


def run(way, folder, model, batch=BATCH, after=None, how="", resumes=True):
    """Trains a model, on all ranks of the job.

    Args:
        way: how.
        folder: directory of all files.
        model: the model of this rank, new or as an earlier attempt has left it.
        batch: global batch size.
        after: number of batches to the interruption. Defaults to `None`: there is none.
        how: see `Interrupt`.
        resumes: whether a callback writes and resumes.
    """
    seen = Trajectory(way, batch)
    log, others = keras.callbacks.CSVLogger(folder / "log.csv"), []
    steps = SAMPLES // batch
    if way.rate == "warmup":
        others.append(LearningRateWarmupCallback(0.02, 2, steps_per_epoch=steps))
    if way.rate == "schedule":
        others.append(
            LearningRateScheduleCallback(
                0.02, lambda epoch: abs(epoch - 1), staircase=False, steps_per_epoch=steps
            )
        )
        others.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7))
    if not way.exact:
        others.append(keras.callbacks.ReduceLROnPlateau("value", 0.5, 1, mode="min"))
    if way.stops:
        others.append(
            keras.callbacks.EarlyStopping(
                "value", patience=1, mode="min", restore_best_weights=True
            )
        )
    best = keras_dist.callbacks.ModelCheckpoint(
        folder / "best.weights.h5", "value", save_best_only=True, save_weights_only=True, mode="min"
    )
    keeper = keeper_of(way, folder) if resumes else None
    callbacks = [Values(), *others, best, RootOnly(log), seen, *([keeper] if resumes else [])]
    interrupt = Interrupt(after, how)
    # Before the callback that writes, to end the step before it does.
    callbacks = keras_dist.callbacks(interrupt, *callbacks)
    data, end = data_of(way, batch), None
    try:
        history = model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        end = [history.epoch, state_of(model, way), best.best, history.history, seen.seen]
        if keras_dist.rank() == 0:
            end.append((folder / "log.csv").read_text())
    except Interrupted:
        if isinstance(keeper, ShardedCheckpoint):
            keeper._store.settle()
    last = max(seen.states, default=None)
    return Run(seen.begin, last, seen.states, end)


# --- The files


def keeper_of(way, folder):
    """Returns the callback that writes and resumes."""
    if way.callback.startswith("parts"):
        behind = way.callback == "parts behind"
        return ShardedCheckpoint(folder / "files", way.save_freq, asynchronous=behind)
    return BackupAndRestore(
        folder / "files", way.save_freq, delete_checkpoint=False, memory=way.callback == "memory"
    )


def written(way, folder):
    """Returns position and file of all generations, newest first. Another generation is older."""
    paths = [*folder.glob("memory/*/*/*.json"), *folder.glob("files/*.json")]
    paths.sort(key=format.number_of, reverse=True)
    found = [(look(path), path) for path in paths]
    whole = [(contents, path) for contents, path in found if not isinstance(contents, str)]
    intact = [pair for pair in whole if not format.find_damage(pair[0].generation)]
    return [(position(contents.about), path) for contents, path in intact]


def position(about):
    step = about["step"] * (about["global_batch"] or BATCH)
    return about["epoch"] * SAMPLES + step
