"""JAX: a primitive that marks where gradients are reduced, and steps that are cut there.

A compiled program of JAX can call the host only by a callback, which copies what it is given
and what it returns. So the train step is compiled in two programs, before and after the
reduction, and between them the host works on the arrays where they lie (`jax_split`). Where a
step cannot be cut, as in a `jax.jit` of the user's own, the primitive becomes a callback.
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

OnHost = Callable[[np.ndarray], np.ndarray]

__all__ = [
    "add_up_rows",
    "after",
    "as_dense",
    "build_from",
    "check_model",
    "finish_calls",
    "first_batch",
    "limit_threads",
    "multiply",
    "pass_over",
    "pin_device",
    "pull_back",
    "reduce_gradients",
    "through_host",
    "train_step_for_host",
]


def pin_device(local_rank: int, local_size: int) -> str | None:
    """Lets JAX see the GPU of the local rank alone. See `Backend.pin_device`."""
    return choose_gpu(local_rank, local_size)


def limit_threads(count: int, override: bool) -> None:
    """Sizes XLA's pool, unless JAX has been used already. See `Backend.limit_threads`."""
    # XLA takes the size from this variable when the CPU client is made, and offers no other way.
    if override or "NPROC" not in os.environ:
        os.environ["NPROC"] = str(count)


def finish_calls() -> None:
    """Waits for programs with calls of the host. See `Backend.finish_calls`."""
    # What went wrong in one of them is raised where its results are looked at.
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
    """Reduces gradients, the last one first. See `Backend.reduce_gradients`."""
    backwards = [jax.numpy.asarray(gradient) for gradient in reversed(gradients)]
    if not backwards:
        return []
    positions = range(len(gradients) - 1, -1, -1)
    fused = plan(positions, [(g.shape, np.dtype(g.dtype)) for g in backwards])
    now = np.bool_(True) if when is None else when
    return list(reversed(_reduction.bind(now, *backwards, fused=fused)))


def through_host(tensor: Any, forward: OnHost, backward: OnHost) -> Any:
    """Calls the host where the step is cut, for the gradient too. See `Backend.through_host`."""

    def call(function: OnHost, local: Any) -> Any:
        def on_host(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [function(array) for array in arrays]

        [result] = _reduction.bind(np.bool_(True), local, fused=on_host)
        return result

    through = jax.custom_vjp(lambda local: call(forward, local))
    through.defvjp(
        lambda local: (call(forward, local), None), lambda _, gradient: (call(backward, gradient),)
    )
    return through(tensor)


def after(earlier: Any, tensors: Sequence[Any]) -> list[Any]:
    """Does nothing: the host is called in the order of the program. See `Backend.after`."""
    return list(tensors)


def pull_back(
    model: Any, inputs: np.ndarray, loss: Callable[[Any], Any] | None, through: bool
) -> tuple[np.ndarray, Callable[[np.ndarray, float], tuple[list[Any], np.ndarray | None]]]:
    """Keeps what `jax.vjp` gives. See `Backend.pull_back`."""
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
        return list(found), np.asarray(of_inputs) if through else None

    return np.asarray(result), back


def add_up_rows(gradients: Sequence[Any]) -> list[Any]:
    """Returns them as they are: gradients of JAX are dense."""
    return list(gradients)


def as_dense(gradients: Sequence[Any]) -> list[Any]:
    """Returns them as they are: gradients of JAX are dense."""
    return list(gradients)


def multiply(gradients: Sequence[Any], factor: float) -> list[Any]:
    """Multiplies gradients by a number. See `Backend.multiply`."""
    return [gradient * factor for gradient in gradients]


def pass_over(
    count: int, logs: dict[str, Any], state: Any, batches: Any
) -> tuple[dict[str, Any], Any]:
    """Leaves the state as it is. See `Backend.pass_over`."""
    if isinstance(batches, Iterator):  # or a list, in earlier versions of Keras
        from keras_dist._compat.keras.models import batches_in_item

        next(batches)  # no more data is the end of an epoch, unless it ends within an execution
        for _ in itertools.islice(batches, count // batches_in_item(count) - 1):
            pass
    return logs, state


def first_batch(count: int, state: Any, batches: Any) -> tuple[Any, tuple[Any, ...]]:
    """Takes a batch from the iterator and puts it in front again. See `Backend.first_batch`."""
    if not isinstance(batches, Iterator):  # a list, in earlier versions of Keras
        return (batches[0] if batches else None), (state, batches)
    taken = list(itertools.islice(batches, 1))
    batch = taken[0] if taken else None
    # With `steps_per_execution` Keras 3.16 stacks batches, and lists those that fill no execution.
    first = batch[0] if isinstance(batch, list) else batch
    return first, (state, itertools.chain(taken, batches))


def build_from(model: Any, batches: Any) -> None:
    """Does nothing: Keras builds a model of this backend before `fit` calls callbacks."""


def check_model(model: Any) -> None:
    """Does nothing: JAX averages under `keras.distribution` alone. See `Backend.check_model`."""


@contextlib.contextmanager
def train_step_for_host(model: Any) -> Iterator[None]:
    """Compiles the step in two programs, around the reduction. See `Backend.train_step_for_host`.

    Keras would compile the whole step; it is given one that is compiled already.
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


# Takes whether to reduce now, and gradients; gives the reduced gradients.
_reduction = Primitive("keras_dist_reduction")
_reduction.multiple_results = True


def _on_host(now: Any, *gradients: Any, fused: Any) -> list[Any]:
    """Reduces arrays on the host, reading them and handing over results where they lie."""
    if not now:
        return list(gradients)
    results = fused([np.asarray(gradient) for gradient in gradients])
    return [
        # Where the gradient is bound to no device the result must not be either: the second step
        # would find weights that are, and be compiled for them once more.
        jax.device_put(result, gradient.sharding if gradient.committed else None, may_alias=True)
        for result, gradient in zip(results, gradients, strict=True)
    ]


def _in_callback(now: Any, *gradients: Any, fused: Any) -> Any:
    def reduce(now: Any, *arrays: Any) -> tuple[np.ndarray, ...]:
        host = [np.asarray(array) for array in arrays]
        return tuple(np.array(result) for result in fused(host)) if now else tuple(host)

    shapes = tuple(jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients)
    return io_callback(reduce, shapes, now, *gradients, ordered=True)


# Calls of the host keep their order within a program: they have the effect that says so.
_in_order = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
_reduction.def_impl(_on_host)
_reduction.def_effectful_abstract_eval(lambda now, *gradients, fused: (list(gradients), _in_order))
mlir.register_lowering(_reduction, mlir.lower_fun(_in_callback, multiple_results=True))
