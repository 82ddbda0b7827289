"""The steps of a model that Keras traces: what runs before the first one, and tracing them anew."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_dist._compat.keras.models import layers_of
from keras_dist.training.model_state import SKIPPING

# Attribute of a function that stands in for the train function until its first call.
STEP = "_keras_dist_step"


def before_first_step(model: keras.Model, run: Callable[..., Any]) -> None:
    """Runs a function in place of the first step of a fit."""

    def first_step(*arguments: Any) -> Any:
        model.train_function = getattr(first_step, STEP)
        return run(*arguments)

    setattr(first_step, STEP, model.train_function)
    model.train_function = first_step


def retrace(model: keras.Model) -> None:
    """Makes a model trace its steps again, since constants in them have changed."""
    for inner in layers_of(model):
        if isinstance(inner, keras.Model):
            renew_steps(inner)
            inner.test_function = inner.predict_function = None
            # Skipped steps are those of a restored model, whose constants are known.
            if inner.train_function is not None and SKIPPING not in inner.__dict__:
                _renew_train_function(inner)


def renew_steps(model: keras.Model) -> None:
    """Gives a model functions that JAX has not traced: it knows traced functions by their value."""
    if keras.backend.backend() != "jax":
        return
    for name in ("train_step", "test_step"):
        step = model.__dict__.get(name) or getattr(model, name)
        model.__dict__[name] = _Renewed(step.func if isinstance(step, _Renewed) else step)


class _Renewed(functools.partial):
    """A step that is equal to no other."""


def _renew_train_function(model: keras.Model) -> None:
    """Makes a new train function; functions that stand in for it stay."""
    outermost = stand_in = model.train_function
    model.make_train_function(force=True)
    if not hasattr(outermost, STEP):
        return
    while hasattr(getattr(stand_in, STEP), STEP):
        stand_in = getattr(stand_in, STEP)
    setattr(stand_in, STEP, model.train_function)
    model.train_function = outermost
