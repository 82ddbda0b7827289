"""The JAX backend: a primitive for the reduction, and train steps that are split at it.

In a step that is not split, such as a `jax.jit` in the script, the primitive becomes a call of the
host. See decision 5.
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

from keras_dist._backends import Backend, HostFunction, jax_callback, uncompiled_step
from keras_dist._backends.jax_devices import (
    choose_gpu,
    engine_arrays,
    number_of_gpu,
    place_of,
    to_jax,
)
from keras_dist._backends.jax_rows import known_rows, table_of
from keras_dist._backends.jax_split import Traits, split_at
from keras_dist._gpu import DeviceArray, counts_host_memory


def reduce_joined(
    fused: Any, gradients: Sequence[Any], call: Callable[[Any, Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Reduces the gradients of a plan, joined to one array for each bucket."""

    def reduce(arrays: Sequence[Any]) -> list[Any]:
        return [result for [result] in fused.reduce_buckets([[array] for array in arrays])]

    flats = [_joined(bucket, gradients) for bucket in fused.buckets]
    reduced: dict[int, Any] = {}
    for bucket, flat in zip(fused.buckets, call(reduce, flats), strict=True):
        for slot in bucket.slots:
            part = flat[slot.offset : slot.offset + slot.count]
            reduced[slot.index] = part.reshape(slot.shape)
    return [reduced[index] for index in range(len(gradients))]


def _joined(bucket: Any, gradients: Sequence[Any]) -> Any:
    """Returns the gradients of a bucket as one array, laid out as in the plan."""
    parts, end = [], 0
    for slot in bucket.slots:
        if slot.offset > end:
            parts.append(jax.numpy.zeros(slot.offset - end, bucket.dtype))
        parts.append(gradients[slot.index].reshape(-1))
        end = slot.offset + slot.count
    return jax.numpy.concatenate(parts) if len(parts) > 1 else parts[0]


# A function of `now`, whether to reduce in this step, and gradients; returns the reduced gradients.
_reduction = Primitive("keras_dist_reduction")
_reduction.multiple_results = True
# Its parameters, beside the function of their arrays: one that queues it if it overlaps, whether it
# takes arrays in GPU memory, the shapes of results unlike the arrays, those of `Traits`, those of
# `take_rows`, and what makes one value of the rows of a table.
PARAMETERS = dict.fromkeys(
    ["queue", "on_device", "shapes", "are_alike", "comes_early", "tables", "known", "by_rows"]
)


def _call(function: Any, now: Any, arrays: Sequence[Any], **parameters: Any) -> list[Any]:
    given = PARAMETERS | parameters
    return _reduction.bind(now, *arrays, reduce=function, **given)


def _start(
    now: Any,
    *gradients: Any,
    reduce: Any,
    queue: Any,
    on_device: bool,
    known: Any,
    by_rows: Any,
    **_: Any,
) -> Callable[[], list[Any]]:
    """Reduces arrays where they are, without copies of arguments and results."""
    # One that does not depend on the step, as that of a scalar weight that no loss uses, is a
    # literal of the program: a scalar of numpy.
    gradients = tuple(g if isinstance(g, jax.Array) else jax.numpy.asarray(g) for g in gradients)
    if not now:
        return lambda: list(gradients)
    arrays = engine_arrays(gradients) if on_device else [np.asarray(g) for g in gradients]
    places = [place_of(gradient) for gradient in gradients]
    if known is not None:
        arrays, places = _with_tables(arrays, places, known, by_rows)
    wait = functools.partial(list, reduce(arrays)) if queue is None else queue(arrays).wait
    return lambda: [
        table_of(result, place) if _is_by_rows(result) else to_jax(result, place)
        for result, place in zip(wait(), places, strict=True)
    ]


def _is_by_rows(result: Any) -> bool:
    return not isinstance(result, np.ndarray | DeviceArray)


def _with_tables(
    arrays: Sequence[np.ndarray], places: Sequence[Any], known: Sequence[Any], by_rows: Any
) -> tuple[list[Any], list[Any]]:
    """Returns arrays and their places with the rows of a table as one, see `take_rows`."""
    left = zip(arrays, places, strict=True)
    tables: list[tuple[Any, Any]] = []
    for shape in known:
        array: Any
        array, place = next(left)
        if shape is not None:
            values, place = next(left)
            array = by_rows(*known_rows(array, values, shape[0]), shape)
        tables.append((array, place))
    return [array for array, _ in tables], [place for _, place in tables]


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


class Jax(Backend):
    """JAX."""

    name = "jax"
    pin_device = staticmethod(choose_gpu)
    engine_arrays = staticmethod(engine_arrays)
    differentiable = staticmethod(jax_callback.differentiable)

    def gpu_number(self) -> int | None:
        return 0 if counts_host_memory() else number_of_gpu()

    def limit_threads(self, count: int, override: bool) -> None:
        # XLA reads this variable when it creates the CPU client; there is no other way.
        if override or "NPROC" not in os.environ:
            os.environ["NPROC"] = str(count)

    def finish_calls(self) -> None:
        # The error of a program is raised where its results are used.
        with contextlib.suppress(Exception):
            jax.effects_barrier()

    def host_array(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor)

    def tensor_of(self, array: Any, like: Any) -> Any:
        return array if isinstance(array, np.ndarray) else to_jax(array, place_of(like))

    def reduce_gradients(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        variables: Sequence[Any],
        plan: Callable[..., Any],
        reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
        when: Any = None,
    ) -> list[Any]:
        """Reduces gradients, the last first; a bucket that overlaps is a host call of its own."""
        backwards = [jax.numpy.asarray(gradient) for gradient in reversed(gradients)]
        if not backwards:
            return []
        positions = range(len(gradients) - 1, -1, -1)
        on_gpu = self.gpu_number() is not None
        specs = [(g.shape, np.dtype(g.dtype)) for g in backwards]
        fused = plan(positions, specs, at_once=on_gpu, knows_rows=when is None)
        now = np.bool_(True) if when is None else when
        # The programs of a GPU run while the host waits for a bucket; without a GPU, buckets are
        # queued.
        if on_gpu:
            call = functools.partial(_call, on_device=True, are_alike=True)
            results = reduce_joined(fused, backwards, lambda f, a: call(f, now, a))
            return list(reversed(results))
        most = fused.rows_of_tables() if when is None else [0] * len(backwards)
        call = functools.partial(_call, by_rows=fused.by_rows)
        if not fused.overlaps:
            return list(reversed(call(fused, now, backwards, tables=tuple(most))))
        reduced: dict[int, Any] = {}
        for number, bucket in enumerate(fused.buckets):
            members = [slot.index for slot in bucket.slots]
            results = call(
                functools.partial(fused.reduce_bucket, number),
                now,
                [backwards[index] for index in members],
                queue=functools.partial(fused.queue_bucket, number),
                tables=tuple(most[index] for index in members),
            )
            reduced.update(zip(members, results, strict=True))
        return [reduced[index] for index in positions]

    def as_tensors(self, gradients: Sequence[Any]) -> list[Any]:
        from keras import ops

        return [g if g is None else ops.convert_to_tensor(g, sparse=False) for g in gradients]

    def form_of(self, gradient: Any) -> tuple[str, str | None]:
        return jax.numpy.result_type(gradient).name, None

    def zeros(self, variable: Any, form: tuple[str, str | None]) -> Any:
        return jax.numpy.zeros(variable.shape, form[0])

    def is_traced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        values = [gradient for gradient in gradients if gradient is not None]
        if not values:  # only then: in `fit`, Keras' variables have no value
            values = [variable.value for variable in variables]
        return jax_callback.is_traced(values)

    def run_on_host(self, function: HostFunction, tensor: Any, on_device: bool) -> Any:
        def apply(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [function(array) for array in arrays]

        [result] = _call(apply, np.bool_(True), [tensor], on_device=on_device)
        return result

    def eagerly(self) -> contextlib.AbstractContextManager[None]:
        return jax.ensure_compile_time_eval()

    def call_host(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        tensors: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:

        def apply(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            return function(*arrays)

        given = [jax.numpy.asarray(tensor) for tensor in tensors]
        return list(_call(apply, np.bool_(True), given, shapes=tuple(shapes), comes_early=True))

    def between_steps(
        self,
        work: Callable[[], None],
        model: Any = None,
        values: tuple[Any, ...] = (),
        others: Sequence[Any] = (),
    ) -> tuple[Any, ...]:
        place = next((at for at, each in enumerate(values) if isinstance(each, tuple)), None)
        if place is None:
            work()
            return values
        import keras  # only here: scripts of JAX may not use it

        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        parts = zip(groups, values[place], strict=True)
        pairs = [pair for each in parts for pair in zip(*each, strict=True)]
        with keras.StatelessScope(state_mapping=pairs) as scope:
            work()
            state = tuple([scope.get_current_value(v) for v in group] for group in groups)
            assigned = [(v, scope.get_current_value(v)) for v in others]
        for variable, value in assigned:
            if value is not None:
                variable.assign(value)
        return (*values[:place], state, *values[place + 1 :])

    def train_step_for_host(
        self, model: Any, with_rows: Callable[..., Any], takes_rows: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Gives Keras a step that is compiled as programs around the reduction."""
        if not model.jit_compile or model.run_eagerly:
            return contextlib.nullcontext()
        step = split_at(_reduction, _start, model.train_step, _traits)
        return uncompiled_step(model, "train_step", step)

    def skip_batches(
        self, count: int, logs: dict[str, Any], *arguments: Any
    ) -> tuple[dict[str, Any], Any]:
        """Returns the state unchanged."""
        state, batches = arguments
        if isinstance(batches, Iterator):  # earlier versions of Keras pass a list
            from keras_dist._compat.keras.models import batches_in_item

            next(batches)  # StopIteration ends the epoch, but an execution may be incomplete
            for _ in itertools.islice(batches, count // batches_in_item(count) - 1):
                pass
        return logs, state

    def first_batch(self, count: int, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        state, batches = arguments
        if not isinstance(batches, Iterator):  # earlier versions of Keras pass a list
            return (batches[0] if batches else None), (state, batches)
        taken = list(itertools.islice(batches, 1))
        batch = taken[0] if taken else None
        # With `steps_per_execution`, Keras 3.16 stacks batches; an incomplete execution is a list.
        first = batch[0] if isinstance(batch, list) else batch
        return first, (state, itertools.chain(taken, batches))


backend = Jax()
