"""A small model, its data, `fit`, and a callback that acts at a place of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import keras_dist

keras_dist.init()
rank = keras_dist.rank()
x = np.random.default_rng(0).standard_normal((96, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)

Place = tuple[Any, ...]


class At(keras.callbacks.Callback):
    """Calls functions at places of `fit`: `("epoch begin", 2)`, `("batch end", 1, 4)`, ...

    Args:
        actions: the functions, by place.
        on: the rank that calls them, or `None`: all.

    Attributes:
        epochs: those that have begun.
        steps: epoch and batch of those that have been trained.
    """

    def __init__(self, actions: Mapping[Place, Callable[[], Any]] = {}, on: int | None = None):
        super().__init__()
        self.actions = actions if on in (None, rank) else {}
        self.epochs: list[int] = []
        self.steps: list[tuple[int, int]] = []

    def _act(self, *place: Any) -> None:
        self.actions.get(place, int)()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)
        self._act("epoch begin", epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._act("epoch end", epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._act("batch begin", self.epochs[-1], batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if logs:  # not a batch that a resumed fit skips
            self.steps.append((self.epochs[-1], batch))
        self._act("batch end", self.epochs[-1], batch)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._act("test batch begin", self.epochs[-1], batch)

    def on_test_end(self, logs: Any = None) -> None:
        self._act("test end", self.epochs[-1])


def on_root(act: Callable[..., Any], *arguments: Any) -> None:
    """Does something on the root while the others wait."""
    keras_dist.barrier()
    if rank == 0:
        act(*arguments)
    keras_dist.barrier()


def build(units: Sequence[int] = (64,), dropout: float = 0.0) -> Any:
    """Returns a compiled model with the same weights in each process."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(count, name=f"dense{i}") for i, count in enumerate((*units, 1))]
    if dropout:
        layers.insert(1, keras.layers.Dropout(dropout, seed=3))
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    return model


def shard(samples: int = 96, batch_size: int = 8, **options: Any) -> Any:
    """Returns the shard of this rank."""
    return keras_dist.data.shard((x[:samples], y[:samples]), batch_size=batch_size, **options)


def fit(
    *callbacks: Any, data: Any = None, model: Any = None, behind: Sequence[Any] = (), **options: Any
) -> Any:
    """Trains with `keras_dist.callbacks`, and others `behind` them; returns the model."""
    model = build() if model is None else model
    data = (x[:16], y[:16]) if data is None else (data,)
    options = {"verbose": 0, "epochs": 2, **options}
    ours = keras_dist.callbacks(*callbacks)  # type: ignore[operator]
    model.fit(*data, callbacks=[*ours, *behind], **options)
    return model
