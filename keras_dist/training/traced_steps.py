"""The steps of a model that Keras traces: tracing them anew."""

import functools

import keras

from keras_dist._compat.keras.models import is_trainer, layers_of


def retrace(model: keras.Model) -> None:
    """Makes a model trace its steps again, since constants in them have changed."""
    for inner in layers_of(model):
        if is_trainer(inner):
            renew_steps(inner)
            inner.test_function = inner.predict_function = None
            if inner.train_function is not None:
                inner.make_train_function(force=True)


def renew_steps(model: keras.Model) -> None:
    """Gives a model functions that JAX has not traced: it knows traced functions by their value."""
    if keras.backend.backend() != "jax":
        return
    for name in ("train_step", "test_step"):
        step = model.__dict__.get(name) or getattr(model, name)
        model.__dict__[name] = _Renewed(step.func if isinstance(step, _Renewed) else step)


class _Renewed(functools.partial):
    """A step that is equal to no other."""
