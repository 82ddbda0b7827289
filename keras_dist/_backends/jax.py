"""The JAX backend: a primitive for the reduction, and train steps that are split at it.

A compiled JAX program can call the host only by a callback, which copies its arguments and results.
So `jax_split` compiles the train step as two programs, before and after the reduction, between
which the host accesses the arrays in place. In a step that is not split, such as a `jax.jit` in the
script, the primitive becomes a callback.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

from keras_dist._backends.jax_devices import choose_gpu
from keras_dist._backends.jax_split import split_at

HostFunction = Callable[[np.ndarray], np.ndarray]

__all__ = [
    "after",
    "as_dense",
    "build_from",
    "check_model",
    "coalesce",
    "differentiable_host_callback",
    "finish_calls",
    "first_batch",
    "limit_threads",
    "multiply",
    "pin_device",
    "reduce_gradients",
    "skip_batches",
    "train_step_for_host",
    "vjp",
]


def pin_device(local_rank: int, local_size: int) -> str | None:
    """Makes JAX see only the GPU of the local rank. See `Backend.pin_device`."""
    return choose_gpu(local_rank, local_size)


def limit_threads(count: int, override: bool) -> None:
    """Sets the size of XLA's pool, if JAX has not been used. See `Backend.limit_threads`."""
    # XLA reads this variable when it creates the CPU client; there is no other way.
    if override or "NPROC" not in os.environ:
        os.environ["NPROC"] = str(count)


def finish_calls() -> None:
    """Waits for programs with host callbacks. See `Backend.finish_calls`."""
    # The error of a program is raised where its results are used.
    with contextlib.suppress(Exception):
        jax.effects_barrier()


def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    variables: Sequence[Any],
    plan: Callable[[Sequence[int], Sequence[tuple[tuple[int, ...], np.dtype]]], Any],
    reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
    when: Any = None,
) -> list[Any]:
    """Reduces gradients, last gradient first. See `Backend.reduce_gradients`."""
    backwards = [jax.numpy.asarray(gradient) for gradient in reversed(gradients)]
    if not backwards:
        return []
    positions = range(len(gradients) - 1, -1, -1)
    fused = plan(positions, [(g.shape, np.dtype(g.dtype)) for g in backwards])
    now = np.bool_(True) if when is None else when
    return list(reversed(_reduction.bind(now, *backwards, fused=fused)))


def differentiable_host_callback(tensor: Any, forward: HostFunction, backward: HostFunction) -> Any:
    """Splits the step at the call and at its gradient.

    See `Backend.differentiable_host_callback`.
    """

    def call(function: HostFunction, local: Any) -> Any:
        def apply(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [function(array) for array in arrays]

        [result] = _reduction.bind(np.bool_(True), local, fused=apply)
        return result

    differentiable = jax.custom_vjp(lambda local: call(forward, local))
    differentiable.defvjp(
        lambda local: (call(forward, local), None), lambda _, gradient: (call(backward, gradient),)
    )
    return differentiable(tensor)


def after(earlier: Any, tensors: Sequence[Any]) -> list[Any]:
    """Returns the tensors: the host is called in program order. See `Backend.after`."""
    return list(tensors)


def vjp(
    model: Any, inputs: np.ndarray, loss: Callable[[Any], Any] | None, with_inputs: bool
) -> tuple[np.ndarray, Callable[[np.ndarray, float], tuple[list[Any], np.ndarray | None]]]:
    """Uses `jax.vjp`. See `Backend.vjp`."""
    before = [variable.value for variable in model.non_trainable_variables]

    def run(weights: Any, given: Any) -> Any:
        outputs, after, penalties = model.stateless_call(
            weights, before, given, training=True, return_losses=True
        )
        return (outputs if loss is None else loss(outputs), penalties), after

    weights = [variable.value for variable in model.trainable_variables]
    given = jax.numpy.asarray(inputs)
    (result, penalties), pull, after = jax.vjp(run, weights, given, has_aux=True)
    for variable, value in zip(model.non_trainable_variables, after, strict=True):
        variable.assign(value)

    def back(gradient: np.ndarray, factor: float) -> tuple[list[Any], np.ndarray | None]:
        factors = [jax.numpy.full_like(penalty, factor) for penalty in penalties]
        found, of_inputs = pull((jax.numpy.asarray(gradient), factors))
        return list(found), np.asarray(of_inputs) if with_inputs else None

    return np.asarray(result), back


def coalesce(gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients: those of JAX are dense. See `Backend.coalesce`."""
    return list(gradients)


def as_dense(gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients: those of JAX are dense. See `Backend.as_dense`."""
    return list(gradients)


def multiply(gradients: Sequence[Any], factor: float) -> list[Any]:
    """Multiplies gradients by a number. See `Backend.multiply`."""
    return [gradient * factor for gradient in gradients]


def skip_batches(
    count: int, logs: dict[str, Any], state: Any, batches: Any
) -> tuple[dict[str, Any], Any]:
    """Returns the state unchanged. See `Backend.skip_batches`."""
    if isinstance(batches, Iterator):  # earlier versions of Keras pass a list
        from keras_dist._compat.keras.models import batches_in_item

        next(batches)  # StopIteration ends the epoch, but an execution may be incomplete
        for _ in itertools.islice(batches, count // batches_in_item(count) - 1):
            pass
    return logs, state


def first_batch(count: int, state: Any, batches: Any) -> tuple[Any, tuple[Any, ...]]:
    """Takes a batch from the iterator and prepends it again. See `Backend.first_batch`."""
    if not isinstance(batches, Iterator):  # earlier versions of Keras pass a list
        return (batches[0] if batches else None), (state, batches)
    taken = list(itertools.islice(batches, 1))
    batch = taken[0] if taken else None
    # With `steps_per_execution`, Keras 3.16 stacks batches; an incomplete execution is a list.
    first = batch[0] if isinstance(batch, list) else batch
    return first, (state, itertools.chain(taken, batches))


def build_from(model: Any, batches: Any) -> None:
    """Does nothing: on JAX, Keras builds a model before `fit` calls callbacks."""


def check_model(model: Any) -> None:
    """Does nothing: JAX averages only under `keras.distribution`. See `Backend.check_model`."""


@contextlib.contextmanager
def train_step_for_host(model: Any) -> Iterator[None]:
    """Compiles the step as programs around the reduction. See `Backend.train_step_for_host`.

    Keras, which would compile the step as one program, receives the compiled step.
    """
    compiles = model.jit_compile and not model.run_eagerly
    if not compiles:
        yield
        return
    own = model.__dict__.get("train_step")
    model.__dict__["train_step"] = split_at(_reduction, _on_host, model.train_step)
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = True
        del model.__dict__["train_step"]
        if own is not None:
            model.__dict__["train_step"] = own


# A function of `now`, whether to reduce in this step, and gradients; returns the reduced gradients.
_reduction = Primitive("keras_dist_reduction")
_reduction.multiple_results = True


def _on_host(now: Any, *gradients: Any, fused: Any) -> list[Any]:
    """Reduces arrays on the host, without copies of arguments and results."""
    if not now:
        return list(gradients)
    results = fused([np.asarray(gradient) for gradient in gradients])
    return [
        # The result is committed to a device only if the gradient is. Otherwise the second step
        # would receive committed weights and be compiled again.
        jax.device_put(result, gradient.sharding if gradient.committed else None, may_alias=True)
        for result, gradient in zip(results, gradients, strict=True)
    ]


def _in_callback(now: Any, *gradients: Any, fused: Any) -> Any:
    def reduce(now: Any, *arrays: Any) -> tuple[np.ndarray, ...]:
        host = [np.asarray(array) for array in arrays]
        return tuple(np.array(result) for result in fused(host)) if now else tuple(host)

    shapes = tuple(jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients)
    return io_callback(reduce, shapes, now, *gradients, ordered=True)


# The effect of an ordered callback keeps host calls in program order.
_ordered = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
_reduction.def_impl(_on_host)
_reduction.def_effectful_abstract_eval(lambda now, *gradients, fused: (list(gradients), _ordered))
mlir.register_lowering(_reduction, mlir.lower_fun(_in_callback, multiple_results=True))
