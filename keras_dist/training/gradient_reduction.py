"""Reduction of the gradients of an optimizer over the ranks."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.optimizer_state import is_embedding, is_overwritten
from keras_dist.ops.gradient_plans import SAME_MODEL, GradientPlans
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.model_state import variable_name
from keras_dist.training.rank_exchanges import reduce_over_ranks
from keras_dist.training.rank_gradients import RankGradients, key_of
from keras_dist.training.rounds import Rounds

# Attribute of gradients that a tape has reduced.
REDUCED = "_keras_dist_reduced"


class GradientReduction:
    """The gradient reduction of one optimizer; caches its plans."""

    def __init__(self, options: ReductionOptions, local_layers: Sequence[keras.Layer] = ()):
        self.options = options
        self.local_layers = local_layers
        self.registered: list[Any] = []  # local variables
        self.variables: Sequence[Any] = ()
        self.has_reduced = False  # in the current update
        self.model = ""  # the name of the model that is trained, if it is known
        self.shards: Any = None  # the `Shards` of an optimizer that shards its state
        #: for anchors, the keys of their weights by their own; `None`: variables are themselves
        self.stands_for: dict[int, int] | None = None
        #: of an optimizer with local steps
        self.rounds: Rounds | None = None
        if options.local_steps is not None:
            self.rounds = Rounds(options, GradientReduction(options.of_rounds()))
        self._plans = GradientPlans(options)
        self._brought: _engine.GradientSet | None = None  # in the current update
        # For compiled steps: the forms that the ranks agreed on, and these ranks.
        self._compared: dict[Any, Any] = {}
        self._compared_by: Any = None

    @property
    def feedback(self) -> _engine.Feedback:
        """What a compression with error feedback keeps, by `key_of` each variable."""
        found: _engine.Feedback = self._plans.feedback
        return found if self.rounds is None else self.rounds.reduction.feedback

    @property
    def takes_rows(self) -> bool:
        """Whether gradients may be rows: the options take them, and all ranks reduce all."""
        has_local = bool(self.registered or self.local_layers)
        return self.options.takes_rows and self.shards is None and not has_local

    def communicator(self) -> _engine.Communicator | None:
        """Returns the communicator of the reduction; `None` if this rank reduces with no other."""
        return None if self.options.is_local else self._with_others(self.options.each_step)

    def replicas(self) -> _engine.Communicator | None:
        """Returns the ranks with equal weights, after a round of local steps; `None` if alone."""
        return self._with_others(self.options.process_set)

    def _with_others(self, process_set: ProcessSet | None) -> _engine.Communicator | None:
        if not runtime.includes_me(process_set):
            return None
        comm = runtime.communicator(process_set)
        return comm if comm.size > 1 else None

    def with_missing(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        use: Callable[[list[Any], list[Any]], Any],
        known: Sequence[Any] = (),
    ) -> Any:
        """Calls a function that reduces gradients, with zeros for missing ones. Collective."""
        # Nothing is exchanged as long as all ranks have the gradients of the same variables. A
        # compiled step that lacks one asks the other ranks once, when it is traced.
        _check_counts(gradients, variables)
        comm, known = self.communicator(), known or variables
        local = self._local_keys(known)
        if comm is None:
            return use(list(gradients), list(variables))
        gradients = _backends.active().as_tensors(gradients)
        own = RankGradients(gradients, variables, known, local, self.model)
        if _backends.active().is_traced(gradients, variables):
            forms = self._forms_for_graph(comm, own) if None in own.forms else own.forms
            return self._bringing(own, forms, use, adapts=False)
        asks = not any(own.forms) or any(map(is_overwritten, own.shared))
        forms = self._compare(comm, own) if asks else own.forms
        while True:
            try:
                return self._bringing(own, forms, use)
            except _engine.UnlikeGradients:
                forms = self._compare(comm, own)

    def _bringing(self, own: RankGradients, forms: Any, use: Any, adapts: bool = True) -> Any:
        """Calls a function that reduces gradients of these forms."""
        self._brought = _engine.GradientSet(own.names, own.keys, forms, adapts)
        try:
            return use(*own.completed(forms))
        finally:
            self._brought = None

    def _forms_for_graph(self, comm: _engine.Communicator, own: RankGradients) -> Any:
        """Compares only once: ranks may trace a step again at different times."""
        if comm is not self._compared_by:
            self._compared_by, self._compared = comm, {}
        key = own.keys, own.forms
        if key not in self._compared:
            self._compared[key] = self._compare(comm, own)
        return self._compared[key]

    def _compare(self, comm: _engine.Communicator, own: RankGradients) -> Any:
        """Returns the form of each gradient that any rank has. Collective; blocks."""
        brought = _engine.GradientSet(own.names, own.keys, own.forms, adapts=True)
        compare = _engine.collectives.compare_gradients
        return _backends.active().call_uncompiled(lambda: compare(comm, brought, SAME_MODEL))

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], when: Any = None
    ) -> list[Any]:
        """Reduces the gradients of variables; `None` stays `None`. See `with_missing`."""
        comm = self.communicator()
        self.has_reduced = True
        check_not_reduced(gradients)
        result = self.reduce_overwriting(gradients, variables)
        options, backend = self.options, _backends.active()
        local = self._local_keys()
        present = [
            at
            for at, (gradient, variable) in enumerate(zip(result, variables, strict=True))
            if gradient is not None and not is_overwritten(variable)
        ]
        alone = [at for at in present if comm is None or key_of(variables[at]) in local]
        if options.dense:
            _replace(result, present, backend.as_dense)
        if options.factor != 1:
            _replace(result, present, functools.partial(backend.multiply, factor=options.factor))
        own = [variables[at] for at in alone]
        _replace(result, alone, functools.partial(backend.coalesce, variables=own))
        if comm is None:
            return result
        if options.scale_local:
            _replace(result, alone, functools.partial(backend.multiply, factor=1 / comm.size))
        shared = [at for at in present if key_of(variables[at]) not in local]
        reduce = functools.partial(self._reduce, comm, [variables[at] for at in shared], when)
        _replace(result, shared, reduce)
        return result

    def _reduce(
        self,
        comm: _engine.Communicator,
        variables: Sequence[Any],
        when: Any,
        gradients: Sequence[Any],
    ) -> list[Any]:
        return _backends.active().reduce_gradients(
            gradients,
            [_name(variable) for variable in variables],
            variables,
            functools.partial(self._plan, comm, variables),
            functools.partial(_reduce_slices, self.options, self._brought),
            when,
        )

    def queue(
        self, arrays: Sequence[np.ndarray], variables: Sequence[Any]
    ) -> Callable[[], Sequence[np.ndarray]]:
        """Begins to reduce arrays; returns a function that waits. Collective; does not block."""
        comm = self.communicator()
        if comm is None:
            return lambda: arrays
        # The last one first, as in a step: so the plan is the same.
        positions, given = range(len(arrays) - 1, -1, -1), arrays[::-1]
        specs = [(array.shape, array.dtype) for array in given]
        plan = self._plan(comm, variables, positions, specs, at_once=True)
        work = functools.partial(_engine.piggyback.hold, functools.partial(plan, given))
        handle = comm.order.queue(work, "average of local steps")
        # What others notice meanwhile is told here, at the same step on all ranks.
        return lambda: _engine.piggyback.release(handle.wait())[::-1]

    def reduce_overwriting(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces gradients that Keras assigns to float8 scales and maxima; leaves others."""
        _check_counts(gradients, variables)
        result = list(gradients)
        present = [at for at, gradient in enumerate(gradients) if gradient is not None]
        overwriting = [at for at in present if is_overwritten(variables[at])]
        if not overwriting or self.communicator() is None:
            return result
        self.has_reduced = self.has_reduced or overwriting == present
        local = self._local_keys()
        shared = [at for at in overwriting if key_of(variables[at]) not in local]
        if not shared:
            return result
        flat = [ops.reshape(ops.cast(result[at], "float32"), (-1,)) for at in shared]
        name = "the largest magnitudes for float8"
        maxima = reduce_over_ranks(
            self.options.each_step, ops.concatenate(flat), _engine.ReduceOp.MAX, name
        )
        end = 0
        for at in shared:
            begin, end = end, end + math.prod(variables[at].shape)
            shaped = ops.reshape(maxima[begin:end], variables[at].shape)
            result[at] = ops.cast(shaped, result[at].dtype)
        # Host callbacks must run in the same order on every rank.
        later = [at for at in present if at not in overwriting]
        ordered = _backends.active().after(maxima, [result[at] for at in later])
        for at, gradient in zip(later, ordered, strict=True):
            result[at] = gradient
        return result

    def agreed(self, condition: Any) -> Any:
        """Returns, inside a training step, whether a boolean tensor is true on all ranks."""
        if self.communicator() is None:
            return condition
        is_false = 1.0 - ops.cast(ops.reshape(condition, (1,)), "float32")
        name, op = "whether gradients are finite", _engine.ReduceOp.SUM
        return ops.all(reduce_over_ranks(self.options.each_step, is_false, op, name) == 0)

    def local_variables(self) -> list[Any]:
        """Returns the local variables; layers that are not built have none yet."""
        return self.registered + [
            v for layer in self.local_layers for v in layer.trainable_variables
        ]

    def _local_keys(self, known: Sequence[Any] | None = None) -> set[int]:
        keys = {key_of(variable) for variable in known or ()}
        # Of variables that are not trainable, registration ends the broadcast alone.
        expected = self.registered if known is not None else ()
        missing = [variable for variable in expected if key_of(variable) not in keys]
        wrong = [v for v in missing if not isinstance(v, keras.Variable) or v.trainable]
        if wrong:
            raise errors.ArgumentError(
                "local variables to be among the variables of the gradients",
                f"{variable_name(wrong[0])!r}, which is not among {len(keys)}",
                "Register the variables that the optimizer updates.",
            )
        return {key_of(variable) for variable in self.local_variables()}

    def _plan(
        self,
        comm: _engine.Communicator,
        variables: Sequence[Any],
        positions: Sequence[int],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        at_once: bool = False,
        knows_rows: bool = False,
    ) -> _engine.FusedAllreduce:
        names = [_name(variables[position]) for position in positions]
        keys: list[Any] = [key_of(variables[position]) for position in positions]
        if self.stands_for is not None:
            keys = list(map(self.stands_for.get, keys))
        groups = self.options.grouped([variables[position] for position in positions])
        tables = [at for at, position in enumerate(positions) if is_embedding(variables[position])]
        brought = self._brought
        return self._plans(comm, names, specs, groups, keys, brought, at_once, knows_rows, tables)


def _reduce_slices(
    options: ReductionOptions,
    brought: _engine.GradientSet | None,
    name: str,
    values: np.ndarray,
    indices: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    comm = options.ranks()  # at run time: a graph may outlive its communicator
    op = _engine.OpOptions(options.op, gradients=brought)
    return _engine.collectives.reduce_slices(comm, values, indices, name, op, notices=True)


def _replace(
    values: list[Any], indices: Sequence[int], change: Callable[[list[Any]], list[Any]]
) -> None:
    """Replaces the values at some indices by their images."""
    for index, value in zip(indices, change([values[index] for index in indices]), strict=True):
        values[index] = value


def mark_reduced(gradients: list[Any]) -> list[Any]:
    """Marks gradients as reduced, so that an optimizer rejects them; returns them."""
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, REDUCED, True)
    return gradients


def check_not_reduced(gradients: Sequence[Any]) -> None:
    """Checks that no tape has reduced the gradients."""
    if any(getattr(gradient, REDUCED, False) for gradient in gradients):
        raise errors.ArgumentError(
            "gradients of this rank alone, which this optimizer reduces",
            "gradients that a DistributedGradientTape has reduced",
            "Use the tape with a plain optimizer, or this optimizer with a plain tape.",
        )


def _check_counts(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    if len(gradients) != len(variables):
        raise errors.ArgumentError(
            f"a gradient or None for each of {len(variables)} variables",
            f"{len(gradients)} gradients",
            "Pass the variables of the gradients, in the same order.",
        )


def _name(variable: Any) -> str:
    return f"the gradient of {variable_name(variable)}"
