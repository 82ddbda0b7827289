"""Comparison of the optimizers of all ranks, before the first step of a fit."""

import contextlib
import warnings
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import is_part_of_keras
from keras_dist.training.copied_options import KeepsOptions, plain_config
from keras_dist.training.model_state import families, optimizers_of

WRAP = (
    "Pass optimizer=keras_dist.DistributedOptimizer(...) to compile, and load models by "
    "keras_dist.load_model."
)


def compare_optimizers(model: keras.Model, root_rank: int) -> None:
    """Checks that gradients are averaged, and compares hyperparameters with those of the root.

    Collective: every rank; blocks. The root warns of hyperparameters that differ, and of plain
    optimizers if the model has a train step of its own, which may average gradients.
    """
    comm, optimizers = runtime.communicator(), optimizers_of(model)
    is_distributed = any(isinstance(optimizer, KeepsOptions) for optimizer in optimizers)
    everyone = _engine.collectives.allgather_object(
        comm, (is_distributed, hyperparameters(model)), operation="the comparison of optimizers"
    )
    are_distributed, values = zip(*everyone, strict=True)
    if any(are_distributed) and not all(are_distributed):
        where = f"[rank {are_distributed.index(False)} of {comm.size}]"
        expected = f"the optimizer of model {model.name!r} to be distributed"
        received = f"a plain one, while that of rank {are_distributed.index(True)} is distributed"
        raise errors.MismatchError(where, expected, received, WRAP)
    if not is_distributed and optimizers:
        _refuse_plain(model, optimizers[0], root_rank)
    _warn_of_differences(values, root_rank)


def _refuse_plain(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, root_rank: int
) -> None:
    own_step = not is_part_of_keras(type(model).train_step)
    text = errors.explain(
        runtime.where(),
        f"the optimizer of model {model.name!r} to be distributed",
        f"a plain {type(optimizer).__name__}; gradients are not averaged",
        f"{WRAP} Ignore this warning if train_step averages gradients itself."
        if own_step
        else f"{WRAP} To train another model on each rank, omit the callbacks of keras_dist.",
    )
    if not own_step:
        raise errors.UsageError(text)
    _warn(text, root_rank)


def _warn_of_differences(values: tuple[dict[str, str], ...], root_rank: int) -> None:
    expected = values[root_rank]
    differing = [
        f"{name}={value} on rank {rank}, where rank {root_rank} has {expected[name]}"
        for rank, mine in enumerate(values)
        for name, value in mine.items()
        if expected.get(name, value) != value
    ]
    if differing:
        text = errors.explain(
            runtime.where(),
            "optimizers with equal hyperparameters on all ranks",
            "; ".join(differing[:8]),
            f"All ranks train with the learning rate of rank {root_rank}; other values stay, and "
            "replicas differ. In a search, draw on one rank and call keras_dist.broadcast_object, "
            "or train each trial on a process set.",
        )
        _warn(text, root_rank)


def _warn(text: str, root_rank: int) -> None:
    if runtime.rank() == root_rank:
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def hyperparameters(model: keras.Model) -> dict[str, str]:
    """Returns the hyperparameters of the optimizers of a model, as text by name."""
    found: dict[str, str] = {}
    for number, (optimizer, *_) in enumerate(families(model)):
        prefix = f"optimizer {number + 1}: " if number else ""
        with contextlib.suppress(Exception):  # a class of the user may have no configuration
            _collect(found, prefix, plain_config(optimizer))
    return found


def _collect(found: dict[str, str], prefix: str, config: dict[str, Any]) -> None:
    for name, value in config.items():
        if isinstance(value, dict) and isinstance(value.get("config"), dict):
            _collect(found, f"{prefix}{name}.", value["config"])  # of a schedule, or inside
        elif name != "name" and " at 0x" not in repr(value):
            found[prefix + name] = f"{value:.7g}" if isinstance(value, float) else repr(value)
