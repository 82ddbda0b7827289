"""Optimizers that Keras has made of distributed ones: what they reduce is settled when they train.

Before, the variables and layers that options name may not exist, and the copy may be wrapped anew,
with other options. A `LossScaleOptimizer` skips a step when a gradient of its own rank overflows,
so it reduces in place of its inner optimizer: by `make_train_function` for models, by
`watch_loss_scales` for custom loops.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import errors
from keras_dist._compat.keras.optimizer_state import trained_by
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER, inner_optimizer
from keras_dist.ops.reduction_options import parse_reduction_options
from keras_dist.training import saved_options
from keras_dist.training.distributed import attach, check_independent, is_distributed
from keras_dist.training.gradient_reduction import GradientReduction
from keras_dist.training.local_steps import with_local_steps
from keras_dist.training.model_state import optimizers_inside
from keras_dist.training.saved_options import KeepsOptions, base_of, derived, text_in
from keras_dist.training.sharding import check_unscaled

# Attribute of a copy: the text of its options.
SAVED = "_keras_dist_saved"


def _completing(name: str) -> Callable[..., Any]:
    """Returns a method that makes the copy distributed and calls its method of this name."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        complete(self)
        return getattr(self, name)(*args, **kwargs)  # of the class that it has now

    method.__name__ = name
    return method


class _Copied(KeepsOptions):
    """Mixin of a copy that has not trained yet."""

    def _keras_dist_text(self) -> str:
        text: str = self.__dict__[SAVED]
        return text

    apply = _completing("apply")
    apply_gradients = _completing("apply_gradients")
    stateless_apply = _completing("stateless_apply")
    register_local_var = _completing("register_local_var")


def watch_copies(optimizer: Any) -> None:
    """Makes copies of an optimizer, and of all that Keras loads from files, keep their options."""
    watch_files()
    known = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, MULTI_OPTIMIZER)
    for cls in (*filter(None, known), *map(type, [optimizer, *optimizers_inside(optimizer)])):
        _watch_configurations(next(o for o in cls.__mro__ if "from_config" in vars(o)))


@functools.cache
def watch_files() -> None:
    """Makes optimizers that Keras loads from files keep the options that they were saved with."""

    def load_assets(self: Any, directory: str | None) -> None:
        """Reads the options of a distributed optimizer. Keras calls it when it loads a model."""
        path = pathlib.Path(directory or "", saved_options.FILE)
        if directory is not None and path.exists():
            _remember(self, path.read_text())

    keras.optimizers.Optimizer.load_assets = load_assets


@functools.cache
def _watch_configurations(owner: Any) -> None:
    if owner is KeepsOptions:  # passes them on to the user's class
        return
    original = vars(owner)["from_config"].__func__

    @functools.wraps(original)
    def from_config(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        text = text_in(config)
        if text is None:
            return original(cls, config, *args, **kwargs)
        made = original(cls, {str(key): value for key, value in config.items()}, *args, **kwargs)
        _remember(made, text)
        return made

    owner.from_config = classmethod(from_config)


def _remember(optimizer: Any, text: str) -> None:
    if not isinstance(optimizer, KeepsOptions):
        object.__setattr__(optimizer, SAVED, text)
        base: Any = type(optimizer)
        optimizer.__class__ = derived(base, _Copied)


def saved_text(optimizer: Any) -> str | None:
    """Returns the options of a copy that has not trained yet; `None` for other optimizers."""
    return optimizer.__dict__[SAVED] if isinstance(optimizer, _Copied) else None


def forget(optimizer: Any) -> None:
    """Makes a copy, and those inside of it, plain optimizers. Others are unchanged."""
    for member in [optimizer, *optimizers_inside(optimizer)]:
        if isinstance(member, _Copied):
            member.__class__ = base_of(type(member))
            object.__delattr__(member, SAVED)


def complete(optimizer: Any, model: keras.Model | None = None) -> None:
    """Makes a copy distributed with its options. Other optimizers are unchanged."""
    text = saved_text(optimizer)
    if text is None:
        return
    try:
        saved = saved_options.parse(text)
    except ValueError as error:
        expected, remedy = "options of a copied optimizer", "Wrap it in DistributedOptimizer."
        raise errors.CheckpointError(expected, str(error), remedy) from error
    built_for = [] if model is None else model.trainable_variables
    variables = trained_by(optimizer) or built_for
    found, local, layers = saved_options.read(saved, model, variables)
    local_steps = found.pop("local_steps")
    options = with_local_steps(parse_reduction_options(**found), local_steps)
    forget(optimizer)
    reduction = GradientReduction(options, tuple(layers))
    reduction.registered.extend(local)
    attach(optimizer, reduction)


def move_outwards(optimizer: Any) -> bool:
    """Moves the reduction from an inner optimizer to the `LossScaleOptimizer` around it, if any."""
    # Under `mixed_float16`, `compile` wraps the user's optimizer.
    inner = inner_optimizer(optimizer)
    complete(inner)
    if not isinstance(inner, KeepsOptions) or is_distributed(optimizer):
        return False
    reduction = inner._keras_dist
    if reduction.options.shard_state:
        check_unscaled(optimizer)
    if reduction.local_variables():
        check_independent(optimizer)
    # Keras copies the inner optimizer, which was passed to `compile`.
    inner.__class__ = derived(base_of(type(inner)), KeepsOptions)
    attach(optimizer, reduction)
    return True


@functools.cache
def watch_loss_scales() -> None:
    """Patches `LossScaleOptimizer` to move the reduction of its inner optimizer outwards."""
    patched: Any = keras.optimizers.LossScaleOptimizer
    patched.apply = _moving_outwards(patched.apply)
    patched.stateless_apply = _moving_outwards(patched.stateless_apply)


def _moving_outwards(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if move_outwards(self):  # the class has changed, and with it the method
            return getattr(self, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return wrapper
