"""The JAX backend: a primitive for the reduction, and train steps that are split at it.

A compiled JAX program can call the host (`jax_callback`), which then copies results, and JAX takes
time to order such programs. So `jax_split` compiles the train step as two programs, before and
after the reduction, between which the host accesses the arrays in place. In a step that is not
split, such as a `jax.jit` in the script, the primitive becomes a call of the host.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from keras_dist._backends import jax_callback
from keras_dist._backends.jax_device import (
    engine_arrays,
    gpu_number,
    place_of,
    tensor_of,
    to_jax,
)
from keras_dist._backends.jax_devices import choose_gpu
from keras_dist._backends.jax_joined import reduce_joined
from keras_dist._backends.jax_split import Traits, split_at

HostFunction = Callable[[np.ndarray], np.ndarray]

__all__ = [
    "after",
    "as_dense",
    "as_tensors",
    "build_from",
    "call_host",
    "call_uncompiled",
    "check_model",
    "coalesce",
    "differentiable_host_callback",
    "engine_arrays",
    "finish_calls",
    "first_batch",
    "form_of",
    "gpu_number",
    "host_array",
    "is_traced",
    "limit_threads",
    "multiply",
    "pin_device",
    "reduce_gradients",
    "skip_batches",
    "tensor_of",
    "test_step_for_host",
    "train_step_for_host",
    "zeros",
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


def host_array(tensor: Any) -> np.ndarray:
    """See `Backend`."""
    return np.asarray(tensor)


def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    variables: Sequence[Any],
    plan: Callable[..., Any],
    reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
    when: Any = None,
) -> list[Any]:
    """Reduces gradients, last gradient first. See `Backend.reduce_gradients`.

    A bucket that overlaps is a host call of its own.
    """
    backwards = [jax.numpy.asarray(gradient) for gradient in reversed(gradients)]
    if not backwards:
        return []
    positions = range(len(gradients) - 1, -1, -1)
    on_gpu = gpu_number() is not None
    fused = plan(positions, [(g.shape, np.dtype(g.dtype)) for g in backwards], at_once=on_gpu)
    now = np.bool_(True) if when is None else when
    # The programs of a GPU run while the host waits for a bucket; without one, buckets are queued.
    if on_gpu:
        call = functools.partial(_call, on_device=True, are_alike=True)
        results = reduce_joined(fused, backwards, lambda f, a: call(f, now, a))
        return list(reversed(results))
    if not fused.overlaps:
        return list(reversed(_call(fused, now, backwards)))
    reduced: dict[int, Any] = {}
    for number, bucket in enumerate(fused.buckets):
        members = [slot.index for slot in bucket.slots]
        results = _call(
            functools.partial(fused.reduce_bucket, number),
            now,
            [backwards[index] for index in members],
            queue=functools.partial(fused.queue_bucket, number),
        )
        reduced.update(zip(members, results, strict=True))
    return [reduced[index] for index in positions]


def as_tensors(gradients: Sequence[Any]) -> list[Any]:
    """Makes sparse gradients dense. See `Backend.as_tensors`."""
    from keras import ops

    return [g if g is None else ops.convert_to_tensor(g, sparse=False) for g in gradients]


def form_of(gradient: Any) -> tuple[str, str | None]:
    """See `Backend`."""
    return jax.numpy.result_type(gradient).name, None


def zeros(variable: Any, form: tuple[str, str | None]) -> Any:
    """See `Backend`."""
    return jax.numpy.zeros(variable.shape, form[0])


def is_traced(gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
    """See `Backend`."""
    values = [gradient for gradient in gradients if gradient is not None]
    if not values:  # only then: in `fit`, Keras' variables have no value
        values = [variable.value for variable in variables]
    return any(isinstance(value, jax.core.Tracer) for value in values)


def call_uncompiled(function: Callable[[], Any]) -> Any:
    """Calls the function: JAX compiles no Python code. See `Backend.call_uncompiled`."""
    return function()


def differentiable_host_callback(
    tensor: Any, forward: HostFunction, backward: HostFunction, on_device: bool = False
) -> Any:
    """Splits the step at the call and at its gradient.

    See `Backend.differentiable_host_callback`.
    """

    def call(function: HostFunction, local: Any) -> Any:
        def apply(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [function(array) for array in arrays]

        [result] = _call(apply, np.bool_(True), [local], on_device=on_device)
        return result

    differentiable = jax.custom_vjp(lambda local: call(forward, local))
    differentiable.defvjp(
        lambda local: (call(forward, local), None), lambda _, gradient: (call(backward, gradient),)
    )
    return differentiable(tensor)


def call_host(
    function: Callable[..., Sequence[np.ndarray]],
    tensors: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
) -> list[Any]:
    """Splits the step at the call. See `Backend.call_host`."""

    def apply(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return function(*arrays)

    given = [jax.numpy.asarray(tensor) for tensor in tensors]
    return list(_call(apply, np.bool_(True), given, shapes=tuple(shapes), comes_early=True))


def after(earlier: Any, tensors: Sequence[Any]) -> list[Any]:
    """Returns the tensors: the host is called in program order. See `Backend.after`."""
    return list(tensors)


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
def train_step_for_host(model: Any, with_rows: Callable[..., Any]) -> Iterator[None]:
    """Compiles the step as programs around the reduction. See `Backend.train_step_for_host`.

    Keras, which would compile the step as one program, receives the compiled step.
    """
    compiles = model.jit_compile and not model.run_eagerly
    if not compiles:
        yield
        return
    own = model.__dict__.get("train_step")
    model.__dict__["train_step"] = split_at(_reduction, _start, model.train_step, _traits)
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
# Its parameters, beside the function of their arrays: one that queues it if it overlaps, whether it
# takes arrays in GPU memory, the shapes of results unlike the arrays, and those of `Traits`.
PARAMETERS = dict.fromkeys(["queue", "on_device", "shapes", "are_alike", "comes_early"])


def _call(function: Any, now: Any, arrays: Sequence[Any], **parameters: Any) -> list[Any]:
    """Adds a host call to a step."""
    given = PARAMETERS | parameters
    results: list[Any] = _reduction.bind(now, *arrays, reduce=function, **given)
    return results


def _start(
    now: Any, *gradients: Any, reduce: Any, queue: Any, on_device: bool, **_: Any
) -> Callable[[], list[Any]]:
    """Reduces arrays where they are, without copies of arguments and results."""
    # One that does not depend on the step, as that of a scalar weight that no loss uses, is a
    # literal of the program: a scalar of numpy.
    gradients = tuple(g if isinstance(g, jax.Array) else jax.numpy.asarray(g) for g in gradients)
    if not now:
        return lambda: list(gradients)
    arrays = engine_arrays(gradients) if on_device else [np.asarray(g) for g in gradients]
    wait = functools.partial(list, reduce(arrays)) if queue is None else queue(arrays).wait
    places = [place_of(gradient) for gradient in gradients]
    return lambda: [to_jax(result, place) for result, place in zip(wait(), places, strict=True)]


def _traits(queue: Any, are_alike: bool, comes_early: bool, **_: Any) -> Traits:
    return Traits(queue is not None, bool(are_alike), bool(comes_early))


def _in_program(now: Any, *gradients: Any, reduce: Any, shapes: Any, **_: Any) -> list[Any]:
    def call(arrays: list[np.ndarray]) -> Sequence[np.ndarray]:
        now, *host = arrays
        return [now, *(reduce(host) if now else host)]

    found = [gradient.shape for gradient in gradients] if shapes is None else shapes
    return jax_callback.call_host(call, [now, *gradients], [(), *found])[1:]


_reduction.def_impl(lambda *arguments, **parameters: _start(*arguments, **parameters)())


@_reduction.def_effectful_abstract_eval
def _abstract(now: Any, *gradients: Any, shapes: Any, **_: Any) -> Any:
    ordered = {jax_callback.ORDERED}
    if shapes is None:
        return list(gradients), ordered
    return [g.update(shape=s) for s, g in zip(shapes, gradients, strict=True)], ordered


mlir.register_lowering(_reduction, mlir.lower_fun(_in_program, multiple_results=True))


def test_step_for_host(model: Any) -> contextlib.AbstractContextManager[None]:
    """Does nothing: a compiled step may call the host. See `Backend.test_step_for_host`."""
    return contextlib.nullcontext()
