"""Mixins that make a Keras optimizer reduce its gradients, see decisions 1 and 2.

If a class overrides `apply`, gradients are reduced before that method. The reduction overrides an
undocumented Keras method, which another version may rename. `Update` and `check_reduced` hook
different methods: those that receive gradients, and the method that updates variables. In a graph
they run at tracing time and cost nothing per step.
"""

import functools
import weakref
from collections.abc import Iterable
from typing import Any, TypeGuard

import keras
from keras import ops

from keras_dist import _backends, errors
from keras_dist._compat.keras.optimizer_state import batches_seen, trained_by
from keras_dist._compat.keras.optimizers import (
    APPLY_METHODS,
    MULTI_OPTIMIZER,
    ClippingHook,
    UpdateHook,
    stateless_skip,
    stateless_step,
)
from keras_dist.ops.reduction_options import is_variable
from keras_dist.training.gradient_reduction import GradientReduction, check_not_reduced
from keras_dist.training.model_state import accumulators, optimizers_inside, optimizers_of, slice_of
from keras_dist.training.rank_gradients import key_of
from keras_dist.training.rounds import local
from keras_dist.training.saved_options import KeepsOptions, base_of, derived
from keras_dist.training.sharding import Sharded, check_no_local_variables, convert

# Attribute of an optimizer: an update is in progress.
ENTERED = "_keras_dist_entered"

# The distributed optimizers of this process.
_attached: weakref.WeakSet[Any] = weakref.WeakSet()


class Update:
    """Context of the outermost update of an optimizer; checks that gradients were reduced."""

    def __init__(self, optimizer: Any, has_gradients: bool):
        self._optimizer = optimizer
        self.is_outermost = not optimizer.__dict__.get(ENTERED, False)
        self._must_reduce = self.is_outermost and has_gradients and optimizer._reduces()

    def __enter__(self) -> "Update":
        if self.is_outermost:
            self._mark(True)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self.is_outermost:
            return
        try:
            if kind is None and self._must_reduce:
                check_reduced(self._optimizer)
        finally:
            self._mark(False)

    def _mark(self, entered: bool) -> None:
        self._optimizer.__dict__[ENTERED] = entered
        self._optimizer._keras_dist.has_reduced = False


def check_reduced(optimizer: Any) -> None:
    """Checks that the gradients of the current update have been reduced."""
    reduction = optimizer._keras_dist
    if reduction.has_reduced or reduction.communicator() is None:
        return
    versions = f"Keras {keras.__version__} on {keras.backend.backend()}"
    raise errors.BackendError(
        "each update to use the reduced gradients of all ranks",
        f"an update of {optimizer.name!r} by the gradients of this rank alone, with {versions}",
        "End the job: the weights of the ranks differ. Use a version of Keras that keras_dist "
        "supports.",
    )


def check_independent(optimizer: Any) -> None:
    """Checks that an optimizer updates each variable by the gradient of that variable alone."""
    every = [optimizer, *optimizers_inside(optimizer)]
    is_scaled = any(
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer) for optimizer in every
    )
    if is_scaled or any(optimizer.global_clipnorm for optimizer in every):
        raise errors.ArgumentError(
            "an optimizer that updates each variable independently, for local variables",
            "a LossScaleOptimizer" if is_scaled else "an optimizer with global_clipnorm",
            "Use clipnorm instead of global_clipnorm, bfloat16 instead of float16.",
        )


def is_distributed(optimizer: Any) -> TypeGuard["_Distributed"]:
    """Returns whether an optimizer reduces its gradients over the ranks."""
    return isinstance(optimizer, _Distributed)


def distributed_optimizers(model: Any) -> list["_Distributed"]:
    """Returns the distributed optimizers of a model, including those of a custom train step."""
    return [optimizer for optimizer in optimizers_of(model) if is_distributed(optimizer)]


def attach(optimizer: Any, reduction: GradientReduction) -> None:
    """Makes an optimizer reduce its gradients by `reduction`; changes its class in place."""
    base: Any = base_of(type(optimizer)) if isinstance(optimizer, KeepsOptions) else type(optimizer)
    mixin: Any = _ShardedClipping if reduction.options.shard_state else _Clipping
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        mixin = _LossScaled
        # An error is added to the next gradient, which may have another scale.
        keeps_errors = reduction.options.gradient_compression is not None
        if optimizer.inner_optimizer.gradient_accumulation_steps or keeps_errors:
            attach(optimizer.inner_optimizer, reduction)
    elif isinstance(optimizer, MULTI_OPTIMIZER) or _overrides_apply(base):
        mixin = _ReducingFirst
    if reduction.rounds is not None:
        mixin = local(mixin)
    object.__setattr__(optimizer, "_keras_dist", reduction)
    optimizer.__class__ = derived(base, mixin)
    _attached.add(optimizer)
    if reduction.options.shard_state and optimizer.built:
        convert(optimizer)


def variables_of_rank() -> list[Any]:
    """Returns the accumulators and slices of state of all distributed optimizers."""
    every = [optimizer for outer in _attached for optimizer in (outer, *optimizers_inside(outer))]
    slices = [v for optimizer in every for v in optimizer.variables if slice_of(v) is not None]
    return accumulators(every) + slices


def restart_rounds(variables: Iterable[Any]) -> None:
    """Makes rounds of local steps of these variables begin with their values of now."""
    keys = {key_of(variable) for variable in variables}
    for optimizer in _attached:
        rounds = optimizer._keras_dist.rounds
        if rounds is not None and any(key_of(each) in keys for each in rounds.weights):
            rounds.start()


class _Distributed(UpdateHook, KeepsOptions):
    """Base mixin of a distributed optimizer; precedes the user's class in the MRO."""

    _keras_dist: GradientReduction

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the optimizer as Keras does; the copy has the same local variables and layers."""
        unpickle, arguments = self.__reduce__()
        copied = unpickle(*arguments)
        mine = self._keras_dist
        attach(copied, GradientReduction(mine.options, mine.local_layers))
        copied._keras_dist.registered.extend(mine.registered)
        return copied

    def register_local_var(self, variable: Any) -> None:
        """Excludes a variable's gradient from the reduction: the variable is local to each rank.

        Call it on every rank before training. `BroadcastGlobalVariablesCallback` has a method of
        the same name, which excludes the variable from the broadcast.
        """
        if not is_variable(variable):
            raise errors.ArgumentTypeError(
                "a Keras variable or a tf.Variable",
                f"{variable!r} of type {type(variable).__name__}",
                "Pass for example layer.kernel. To exclude layers, pass local_layers=.",
            )
        check_independent(self)
        check_no_local_variables(self._keras_dist.options)
        self._keras_dist.registered.append(variable)

    def apply(self, grads: Any, trainable_variables: Any = None, *rest: Any, **options: Any) -> Any:
        """Updates variables with reduced gradients. See `keras.optimizers.Optimizer`."""
        given = [] if trainable_variables is None else [list(trainable_variables)]
        of = given[0] if given else trained_by(self)
        plain = super().apply  # type: ignore[misc]

        def update_with(ready: Any, variables: Any) -> Any:
            again = [variables] if given else []
            updated = plain(self._prepared(ready, variables), *again, *rest, **options)
            if self._keras_dist.communicator() is not None:
                state = self.variables  # type: ignore[attr-defined]
                _backends.active().end_update(ready, variables, state)
            return updated

        with Update(self, len(grads) > 0) as update:
            # Keras raises its own error for a wrong number of gradients.
            are_known = len(grads) > 0 and (given or len(grads) == len(of))
            if update.is_outermost and are_known:
                return self._with_missing(grads, of, update_with)
            return plain(grads, *given, *rest, **options)

    def _with_missing(self, grads: Any, variables: Any, use: Any) -> Any:
        """Calls a function of gradients and variables, see `GradientReduction.with_missing`."""
        known = trained_by(self) if self.built else ()  # type: ignore[attr-defined]
        return self._keras_dist.with_missing(grads, variables, use, known)

    def _keras_dist_before_update(self) -> None:
        check_reduced(self)

    def _prepared(self, grads: Any, variables: Any) -> Any:
        """Returns the gradients to pass to the user's class."""
        raise NotImplementedError

    def _reduces(self) -> bool:
        """Returns whether the update about to start must be reduced."""
        return True


class _Clipping(ClippingHook, _Distributed):
    """Mixin for Keras' own `apply`: gradients are reduced right before clipping."""

    def _prepared(self, grads: Any, variables: Any) -> Any:
        # Gradients that overwrite their variable are assigned before clipping.
        grads = self._keras_dist.reduce_overwriting(grads, variables)
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            # Keras updates in a branch, which reduces. The mark of reduced gradients is lost here.
            check_not_reduced(grads)
        return grads

    def _reduces(self) -> bool:
        # On other backends, accumulating passes reduce nothing; only updates are checked.
        return not self.gradient_accumulation_steps or keras.backend.backend() == "jax"  # type: ignore[attr-defined]

    def _with_missing(self, grads: Any, variables: Any, use: Any) -> Any:
        backend, steps = _backends.active(), self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if not steps or backend.is_traced(grads, variables) or not (batches_seen(self) + 1) % steps:
            return super()._with_missing(grads, variables, use)
        # This pass accumulates gradients of this rank. Keras requires one.
        ready = list(grads)
        if all(gradient is None for gradient in ready):
            ready[0] = ops.zeros(variables[0].shape, variables[0].dtype)
        return use(ready, list(variables))

    def _keras_dist_before_passes(self, grads: Any, variables: Any) -> None:
        # Clipping, the only call between accumulation and update, does not receive the variables.
        self._keras_dist.variables = list(variables)
        check_not_reduced(grads)  # the mark is lost when gradients are accumulated

    def _keras_dist_before_clipping(self, grads: Any) -> Any:
        variables = self._keras_dist.variables
        if not variables:  # Keras has not called the other hook
            check_reduced(self)
            return grads
        when = None
        if self.gradient_accumulation_steps and keras.backend.backend() == "jax":  # type: ignore[attr-defined]
            # On JAX, Keras calls this method in every step and drops the result of steps that only
            # accumulate; on other backends it calls it only in steps that update.
            when = (batches_seen(self) + 1) % self.gradient_accumulation_steps == 0  # type: ignore[attr-defined]
        return self._keras_dist(grads, variables, when)


class _ShardedClipping(Sharded, _Clipping):
    """Mixin for Keras' own `apply` that also shards the state of the optimizer."""


class _ReducingFirst(_Distributed):
    """Mixin for an overridden `apply`: gradients are reduced before it is called.

    Used for `MultiOptimizer`, which passes gradients on before clipping, and for user classes,
    which may use gradients in any way.
    """

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        with Update(self, len(grads) > 0) as update:
            pairs = grads, variables
            if update.is_outermost:
                pairs = self._with_missing(grads, variables, self._reduced_pairs)
            return super().apply_gradients(list(zip(*pairs, strict=True)))  # type: ignore[misc]

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        of = trained_by(self)
        with Update(self, len(grads) > 0) as update:
            if update.is_outermost:
                # Keras' trainer takes the values out of the variables.
                with keras.StatelessScope(state_mapping=zip(of, trainable_variables, strict=True)):
                    grads, _ = self._with_missing(grads, of, self._reduced_pairs)
            return self._stateless(optimizer_variables, grads, trainable_variables)

    def _reduced_pairs(self, grads: Any, variables: Any) -> tuple[Any, Any]:
        return self._prepared(grads, variables), variables

    def _stateless(self, *given: Any) -> Any:
        return super().stateless_apply(*given)  # type: ignore[misc]

    def _prepared(self, grads: Any, variables: Any) -> Any:
        return self._keras_dist(grads, variables)


class _LossScaled(_ReducingFirst):
    """Mixin for `LossScaleOptimizer`, whose `apply` decides whether to skip the step.

    If the inner optimizer accumulates gradients, it reduces them once per update; in each pass the
    ranks only agree on whether to skip it. So they do with a compression with error feedback.
    """

    inner_optimizer: Any

    def check_finite(self, grads: Any) -> Any:
        finite = super().check_finite(grads)  # type: ignore[misc]
        return finite if self._reduces() else self._keras_dist.agreed(finite)

    def _stateless(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        given = optimizer_variables, grads, trainable_variables
        if self._reduces():
            return super()._stateless(*given)
        # Keras would reduce inside a branch, where a JAX step cannot be split.
        finite = self.check_finite(grads)
        taken = stateless_step(self, *given)
        skipped = stateless_skip(self, optimizer_variables, trainable_variables)
        return keras.tree.map_structure(functools.partial(ops.where, finite), taken, skipped)

    def _prepared(self, grads: Any, variables: Any) -> Any:
        return super()._prepared(grads, variables) if self._reduces() else grads

    def _reduces(self) -> bool:
        return not is_distributed(self.inner_optimizer)


def _overrides_apply(cls: type) -> bool:
    """Returns whether a class overrides a method of `APPLY_METHODS`."""
    owners = [next((o for o in cls.__mro__ if name in vars(o)), object) for name in APPLY_METHODS]
    return any(owner.__module__.split(".")[0] not in ("keras", "builtins") for owner in owners)
