"""TensorFlow: Keras' train step in two XLA programs, between which the host works.

The first computes gradients, the second what the optimizer does with each. What lies between
them, the reduction and clipping among it, is an ordinary graph, for XLA cannot call the host.
Knows no reduction: it is part of `apply_gradients`.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["train_step_for_host"]

_log = logging.getLogger("keras_dist")

# What is split is Keras' own step, where only these methods come after the update. They do not
# look at weights, so that they may as well come before it.
KERAS_OWN = ("train_step", "compute_metrics", "get_metrics_result")


@contextlib.contextmanager
def train_step_for_host(model: Any) -> Iterator[None]:
    """Compiles the step around the update, if it can be. See `Backend.train_step_for_host`.

    Keras would compile the whole step; it is given one that compiles its parts itself.
    """
    if not model.jit_compile or model.run_eagerly:
        yield
        return
    why_not = _why_not(model)
    step = model.train_step if why_not else _split(model, model.train_step)
    if why_not:
        _say_once(why_not)
    model.jit_compile = False
    try:
        with _instead(model, "train_step", step):
            yield
    finally:
        model.jit_compile = True


def _why_not(model: Any) -> str | None:
    """Returns what keeps a model's step from being split; `None` when it can be."""
    import keras

    from keras_dist._compat.keras.models import layers_of

    for name in KERAS_OWN:
        if getattr(model, name) != getattr(keras.Model, name).__get__(model):
            return f"it has a {name} of its own, which may do anything with the update"
    for layer in layers_of(model):
        if getattr(layer, "calls_host", False) or not layer.supports_jit:
            return f"XLA cannot compile a {type(layer).__name__}, which it has"
    return None


def _split(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a train step in two programs. It runs once for each graph that it is traced for."""

    def train_step(data: Any) -> Any:
        variables: list[Any] = []

        def differentiate() -> tuple[Any, list[Any]]:
            pairs: list[tuple[Any, Any]] = []
            with _instead(model.optimizer, "apply_gradients", pairs.extend):
                logs = step(data)
            variables[:] = [variable for _, variable in pairs]
            return logs, [gradient for gradient, _ in pairs]

        logs, gradients = _compiled(differentiate)()
        if variables:
            with _compiled_update(model.optimizer):
                model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return logs

    return train_step


@contextlib.contextmanager
def _compiled_update(optimizer: Any) -> Iterator[None]:
    """Compiles what an optimizer does with each gradient, of the graph that is traced within."""
    from keras_dist._compat.keras.optimizers import TF_UPDATE, applying_of

    applying = applying_of(optimizer)
    update = getattr(applying, TF_UPDATE)

    def compiled_update(strategy: Any, pairs: Sequence[tuple[Any, Any]], *arguments: Any) -> None:
        # The ranks together have another number of rows in every step, and XLA would compile
        # a program for each number.
        rows = [pair for pair in pairs if isinstance(pair[0], tf.IndexedSlices)]
        dense = [pair for pair in pairs if not isinstance(pair[0], tf.IndexedSlices)]
        update(strategy, rows, *arguments)
        _compiled(lambda: update(strategy, dense, *arguments))()

    with _instead(applying, TF_UPDATE, compiled_update):
        yield


def _compiled(function: Callable[[], Any]) -> Any:
    return tf.function(function, autograph=False, jit_compile=True)


@contextlib.contextmanager
def _instead(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Puts a function on an instance for a while, past Keras' tracking."""
    own = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
    owner.__dict__[name] = function
    try:
        yield
    finally:
        del owner.__dict__[name]
        owner.__dict__.update(own)


@functools.cache
def _say_once(why: str) -> None:
    _log.warning(
        "keras_dist trains a model without XLA (jit_compile): %s. Gradients are averaged on "
        "the host, which an XLA program cannot call. Nothing needs to be changed; "
        "compile(..., jit_compile=False) says the same.",
        why,
    )
