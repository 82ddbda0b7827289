"""How an optimizer comes to reduce its gradients: a mixin over the user's own class.

The optimizer keeps its class, its name and its state: a subclass of its own class, with the
same name and module, is put in place on the instance. So `isinstance` holds, state that was
built stays, and a model saved with it loads in a process that has no keras_dist.

The reduction comes after Keras' local gradient accumulation and before clipping, so that a
clipping norm is taken of the averaged gradient. Where a class has an `apply` of its own, it comes
before that one. `update_check` has each update proved to have come through it.
"""

import functools
import pathlib
import weakref
from typing import Any, TypeGuard

import keras
from keras import ops

from keras_dist import errors, runtime
from keras_dist._compat.keras import (
    ENTRANCES,
    MULTI_OPTIMIZER,
    ClippingHook,
    UpdateHook,
    batches_seen,
    inner_optimizer,
    make_unpickler,
    stateless_skip,
    stateless_step,
    trained_by,
)
from keras_dist.training import saved_options
from keras_dist.training.gradient_reduction import GradientReduction, check_not_reduced
from keras_dist.training.model_state import accumulators, optimizers_inside, optimizers_of
from keras_dist.training.update_check import Update, check_reduced

__all__ = [
    "attach",
    "check_local",
    "distributed_optimizers",
    "gathered",
    "is_distributed",
    "move_outwards",
]


# Those that have been made distributed and are still there.
_attached: weakref.WeakSet[Any] = weakref.WeakSet()


def is_distributed(optimizer: Any) -> TypeGuard["_Distributed"]:
    """Tells whether an optimizer reduces its gradients over the ranks."""
    return isinstance(optimizer, _Distributed)


def distributed_optimizers(model: Any) -> list["_Distributed"]:
    """Returns those optimizers of a model that reduce, a custom train step's further ones too."""
    return [one for one in optimizers_of(model) if is_distributed(one)]


def move_outwards(optimizer: Any) -> bool:
    """Moves the reduction from the optimizer inside a `LossScaleOptimizer` to the outside.

    `compile` puts such a wrapper around the user's optimizer under `mixed_float16`. It looks
    at the gradients and, when one overflows, skips the step; left inside, the reduction
    would then be missing on that rank alone. Does nothing for other optimizers.

    Returns:
        Whether there was one to move.
    """
    inner = inner_optimizer(optimizer)
    if not is_distributed(inner) or is_distributed(optimizer):
        return False
    reduction = inner._keras_dist
    if reduction.local_variables():
        check_local(optimizer)
    inner.__class__ = type(inner).__bases__[1]
    object.__delattr__(inner, "_keras_dist")
    attach(optimizer, reduction)
    return True


def attach(optimizer: Any, reduction: GradientReduction) -> None:
    """Makes an optimizer reduce its gradients by `reduction`; changes its class in place."""
    mixin: Any = _Clipping
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        mixin = _LossScaled
        if optimizer.inner_optimizer.gradient_accumulation_steps:
            attach(optimizer.inner_optimizer, reduction)
    elif isinstance(optimizer, MULTI_OPTIMIZER) or _has_own_entrance(type(optimizer)):
        mixin = _HandingOn
    object.__setattr__(optimizer, "_keras_dist", reduction)
    optimizer.__class__ = _distributed_class(optimizer.__class__, mixin)
    _attached.add(optimizer)


def gathered() -> list[Any]:
    """Returns the variables in which distributed optimizers gather gradients of this rank."""
    return accumulators(inner for one in _attached for inner in (one, *optimizers_inside(one)))


def check_local(optimizer: Any, purpose: str = "local variables") -> None:
    """Checks that an optimizer treats each variable by itself.

    Args:
        optimizer: a Keras optimizer.
        purpose: what it must do so for, in words.

    Raises:
        ArgumentError: it does not: what it does to a variable would depend on gradients that
            not all ranks have, of those that each keeps for itself.
    """
    every = [optimizer, *optimizers_inside(optimizer)]
    scaled = any(isinstance(one, keras.optimizers.LossScaleOptimizer) for one in every)
    if scaled or any(one.global_clipnorm for one in every):
        received = "a LossScaleOptimizer" if scaled else "one with a global_clipnorm"
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                f"an optimizer that treats each variable by itself, for {purpose}",
                received,
                "Use clipnorm in place of global_clipnorm, bfloat16 in place of float16.",
            )
        )


@functools.cache
def _distributed_class(base: Any, mixin: Any) -> type:
    made = type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__},
    )
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:
        # Both are saved under the name that the user has registered; it stands for the user's.
        for one in (made, base):
            keras.saving.register_keras_serializable(package, name)(one)
    return made


class _Distributed(UpdateHook):
    """The override that makes an optimizer distributed. Comes before the user's class."""

    _keras_dist: GradientReduction

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an optimizer of the user's class, not distributed, from a configuration."""
        base: Any = cls.__bases__[1]
        return base.from_config(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickles what the user's class would: an optimizer that is not distributed."""
        arguments = super().__reduce__()[1]
        return make_unpickler(type(self).__bases__[1]), arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies as Keras does, and makes the copy distributed on the same terms."""
        make, arguments = self.__reduce__()
        copied = make(*arguments)
        mine = self._keras_dist
        attach(copied, GradientReduction(mine.terms, mine.local_layers))
        copied._keras_dist.registered.extend(mine.registered)
        return copied

    def save_assets(self, directory: str) -> None:
        """Writes the terms of the reduction; Keras calls it when it saves a model.

        Keras alone does not read them; `keras_dist.load_model` does.

        Args:
            directory: where to.
        """
        if hasattr(super(), "save_assets"):
            super().save_assets(directory)  # type: ignore[misc]
        mine = self._keras_dist
        variables = trained_by(self)
        text = saved_options.describe(mine.terms, variables, mine.registered, mine.local_layers)
        pathlib.Path(directory, saved_options.FILE).write_text(text)

    def register_local_var(self, variable: Any) -> None:
        """Leaves a variable's gradient out of the reduction: each rank keeps its own.

        Call it on every rank, before training; the callback that broadcasts the initial state
        has a `register_local_var` as well.

        Args:
            variable: a Keras variable of the model.

        Raises:
            ArgumentTypeError: `variable` is none.
            ArgumentError: the optimizer looks at all gradients together, as for a
                `global_clipnorm` or a loss scale: ranks would no longer take the same steps.
        """
        if not isinstance(variable, keras.Variable):
            raise errors.ArgumentTypeError(
                errors.explain(
                    runtime.where(),
                    "a Keras variable to keep local",
                    f"{variable!r} of type {type(variable).__name__}",
                    "Pass for example layer.kernel; local_layers= takes layers.",
                )
            )
        check_local(self)
        self._keras_dist.registered.append(variable)

    def apply(self, grads: Any, trainable_variables: Any = None, *rest: Any, **options: Any) -> Any:
        """Updates variables by the gradients of all ranks. See `keras.optimizers.Optimizer`.

        Raises:
            ArgumentError: there is not one gradient for each variable.
            BackendError: Keras has updated them by those of this rank alone.
        """
        given = [] if trainable_variables is None else [list(trainable_variables)]
        of = given[0] if given else trained_by(self)
        with Update(self, len(grads) > 0) as update:
            # Of no gradients, or others than it was built for, Keras says what is to be said.
            are_known = len(grads) == len(of) or (given and len(grads) > 0)
            ready = self._prepared(grads, of) if update.is_outermost and are_known else grads
            return super().apply(ready, *given, *rest, **options)  # type: ignore[misc]

    def _keras_dist_before_update(self) -> None:
        check_reduced(self)

    def _prepared(self, grads: Any, variables: Any) -> Any:
        """Returns the gradients with which the user's class is entered."""
        raise NotImplementedError

    def _reduces(self) -> bool:
        """Tells whether an update that is about to begin has to reduce."""
        return True


class _Clipping(ClippingHook, _Distributed):
    """The override for Keras' own `apply`: the reduction comes right before clipping."""

    def _prepared(self, grads: Any, variables: Any) -> Any:
        # What overwrites its variable does so before clipping.
        return self._keras_dist.overwriting(grads, variables)

    def _reduces(self) -> bool:
        # Elsewhere passes that only accumulate reduce nothing; then updates are checked alone.
        return not self.gradient_accumulation_steps or keras.backend.backend() == "jax"  # type: ignore[attr-defined]

    def _keras_dist_before_passes(self, grads: Any, variables: Any) -> None:
        # Clipping, the one call between accumulation and update, is not told of which variables
        # the gradients are.
        self._keras_dist.variables = list(variables)
        check_not_reduced(grads)  # before some passes are gathered, where nobody can tell

    def _keras_dist_before_clipping(self, grads: Any) -> Any:
        variables = self._keras_dist.variables
        if not variables:  # Keras has not called the other hook
            check_reduced(self)
            return grads
        when = None
        if self.gradient_accumulation_steps and keras.backend.backend() == "jax":  # type: ignore[attr-defined]
            # On JAX Keras comes here in every step and drops the result of those that only
            # accumulate; elsewhere only in steps that update.
            when = (batches_seen(self) + 1) % self.gradient_accumulation_steps == 0  # type: ignore[attr-defined]
        return self._keras_dist(grads, variables, when)


class _HandingOn(_Distributed):
    """The override for an `apply` of another kind: gradients are reduced before it sees them.

    That of a `MultiOptimizer`, which hands gradients to others before any clipping, and that of a
    class of the user's, which may do anything with them.
    """

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        with Update(self, len(grads) > 0) as update:
            ready = self._prepared(grads, variables) if update.is_outermost else grads
            return super().apply_gradients(list(zip(ready, variables, strict=True)))  # type: ignore[misc]

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        of = trained_by(self)
        with Update(self, len(grads) > 0) as update:
            ready = self._prepared(grads, of) if update.is_outermost else grads
            return self._stateless(optimizer_variables, ready, trainable_variables)

    def _stateless(self, *given: Any) -> Any:
        return super().stateless_apply(*given)  # type: ignore[misc]

    def _prepared(self, grads: Any, variables: Any) -> Any:
        return self._keras_dist(grads, variables)


class _LossScaled(_HandingOn):
    """The override for a `LossScaleOptimizer`, whose own `apply` decides on skipping.

    Where the optimizer in it accumulates, that one reduces what it has gathered, once for each
    update. Of single passes the ranks tell each other only whether to skip them.
    """

    inner_optimizer: Any

    def check_finite(self, grads: Any) -> Any:
        finite = super().check_finite(grads)  # type: ignore[misc]
        return self._keras_dist.agreed(finite) if self._hands_on_all() else finite

    def _stateless(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        given = optimizer_variables, grads, trainable_variables
        if not self._hands_on_all():
            return super()._stateless(*given)
        # Keras would reduce inside a branch, where a step of JAX cannot be cut.
        finite = self.check_finite(grads)
        taken = stateless_step(self, *given)
        skipped = stateless_skip(self, optimizer_variables, trainable_variables)
        return keras.tree.map_structure(functools.partial(ops.where, finite), taken, skipped)

    def _prepared(self, grads: Any, variables: Any) -> Any:
        return grads if self._hands_on_all() else super()._prepared(grads, variables)

    def _reduces(self) -> bool:
        return not self._hands_on_all()

    def _hands_on_all(self) -> bool:
        """Tells whether the optimizer inside reduces."""
        return is_distributed(self.inner_optimizer)


def _has_own_entrance(made: type) -> bool:
    """Tells whether a class takes gradients in another way than Keras' optimizers do."""
    owners = [next((o for o in made.__mro__ if name in vars(o)), object) for name in ENTRANCES]
    return any(owner.__module__.split(".")[0] not in ("keras", "builtins") for owner in owners)
