"""Private and undocumented names of Keras."""

import functools
from typing import Any

import keras
from keras.src.backend.common import global_state, masking
from keras.src.models import functional
from keras.src.random import seed_generator

from keras_dist._compat.contract import Name

__all__ = [
    "CONTRACT",
    "ENTRANCES",
    "KEPT",
    "LOGS",
    "MULTI_OPTIMIZER",
    "TF_UPDATE",
    "BackupAndRestore",
    "BatchNormalization",
    "ClippingHook",
    "DecayHook",
    "ModelCheckpoint",
    "UpdateHook",
    "accumulators",
    "applying_of",
    "batches_in_item",
    "batches_seen",
    "compiled_metrics",
    "drawn_seeds",
    "global_generator",
    "has_mask",
    "has_weight_decay",
    "initial_epoch_from",
    "inner_optimizer",
    "is_overwritten",
    "is_part_of_keras",
    "is_summed",
    "layers_of",
    "learning_rate",
    "make_unpickler",
    "may_become_ddp",
    "model_of",
    "module_of",
    "optimizer_of",
    "outputs_of",
    "samples_weighted",
    "slots",
    "stateless_skip",
    "stateless_step",
    "trained_by",
    "variable_index",
    "velocities",
    "version",
]


def version() -> str:
    """Returns the name and the version of Keras, and of its backend."""
    return f"Keras {keras.__version__} on {keras.backend.backend()}"


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in keras.__version__.split(".")[:2])


# --- Optimizers

# Gradients enter an optimizer through these methods.
ENTRANCES = ("apply", "apply_gradients", "stateless_apply", "_backend_apply_gradients")
# On TensorFlow: the method that updates variables under a strategy.
TF_UPDATE = "_distributed_tf_update_step"
# Of Keras 3.15 and later.
MULTI_OPTIMIZER: Any = vars(keras.optimizers).get("MultiOptimizer", ())


class UpdateHook:
    """A mixin in front of an optimizer's class that takes part in each update.

    Subclasses define `_keras_dist_before_update()`, called before variables are updated.
    """

    def _backend_update_step(self, grads: Any, trainable_variables: Any, *rest: Any) -> Any:
        self._keras_dist_before_update()
        return super()._backend_update_step(grads, trainable_variables, *rest)  # type: ignore[misc]

    def _backend_reset_gradient_accumulators(self) -> None:
        # On torch Keras multiplies them by 0, which keeps the NaN of an overflow.
        for accumulator in accumulators(self):
            accumulator.assign(keras.ops.zeros(accumulator.shape, accumulator.dtype))

    def _keras_dist_before_update(self) -> None:
        raise NotImplementedError


class ClippingHook:
    """A mixin in front of an optimizer's class that changes gradients between passes and clipping.

    Subclasses define `_keras_dist_before_passes(gradients, variables)`, called before gradients
    are accumulated, and `_keras_dist_before_clipping(gradients)`, which returns the gradients to
    clip and apply.
    """

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        self._keras_dist_before_passes(grads, trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(self._keras_dist_before_clipping(grads))  # type: ignore[misc]

    def _keras_dist_before_passes(self, gradients: Any, variables: Any) -> None:
        raise NotImplementedError

    def _keras_dist_before_clipping(self, gradients: Any) -> Any:
        raise NotImplementedError


class DecayHook:
    """A mixin in front of an optimizer's class whose update includes the weight decay."""

    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing: the decay is part of the step."""


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside a `LossScaleOptimizer`, or a wrapper like it; else `None`."""
    return getattr(optimizer, "inner_optimizer", None)


def applying_of(optimizer: Any) -> Any:
    """Returns the optimizer that updates variables: the innermost of wrappers, or itself."""
    inner = inner_optimizer(optimizer)
    return optimizer if inner is None else applying_of(inner)


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer is built for."""
    return list(optimizer._trainable_variables)


def accumulators(optimizer: Any) -> list[Any]:
    """Returns the variables in which an optimizer itself accumulates gradients; it may have none.

    Keras makes them when it builds an optimizer with `gradient_accumulation_steps`.
    """
    made = vars(optimizer).get("_accumulated_gradients") or []
    return [variable for variable in made if variable is not None]


def slots(optimizer: Any, count: int) -> list[list[Any]]:
    """Returns the lists of an optimizer that hold a variable for each of `count` that it trains."""
    lists = [one for name, one in vars(optimizer).items() if name != "_variables"]
    return [one for one in lists if isinstance(one, list) and len(one) == count]


def batches_seen(optimizer: Any) -> Any:
    """Returns the variable that counts batches; `iterations` counts updates."""
    return optimizer._iterations


def learning_rate(optimizer: Any) -> Any:
    """Returns the schedule, the function or the variable that an optimizer has as its rate."""
    return optimizer._learning_rate


def velocities(optimizer: Any) -> list[Any]:
    """Returns the velocities of an optimizer, such as SGD with momentum; it may have none."""
    return list(vars(optimizer).get("momentums") or ())


def variable_index(optimizer: Any, variable: Any) -> int:
    """Returns the position of a variable among those that an optimizer trains."""
    index: int = optimizer._get_variable_index(variable)
    return index


def has_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Tells whether `exclude_from_weight_decay` leaves a variable in."""
    return bool(optimizer._use_weight_decay(variable))


def stateless_step(
    optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
) -> Any:
    """Returns the state after a step of a `LossScaleOptimizer` whose gradients are finite."""
    given = optimizer_variables, grads, trainable_variables
    return optimizer._stateless_handle_finite_grads(*given)


def stateless_skip(optimizer: Any, optimizer_variables: Any, trainable_variables: Any) -> Any:
    """Returns the state after a step that a `LossScaleOptimizer` skips."""
    return optimizer._stateless_handle_non_finite_grads(optimizer_variables, trainable_variables)


def make_unpickler(cls: Any) -> Any:
    """Returns the function that unpickles objects of a class."""
    return cls._unpickle_model


def is_overwritten(variable: Any) -> bool:
    """Tells whether Keras assigns the gradient of a variable to it, as for float8."""
    # Only such a variable has the attribute, and some are not variables of Keras.
    return bool(getattr(variable, "overwrite_with_gradient", False))


# --- Models and layers

# The method that turns the logs of the last batch into those of an epoch.
LOGS = "_get_metrics_result_or_logs"


def layers_of(model: Any) -> list[Any]:
    """Returns a model, its layers and theirs, in Keras' lists and dicts too."""
    layers: list[Any] = model._flatten_layers()
    return layers


def optimizer_of(model: Any) -> Any:
    """Returns the optimizer that a model is compiled with; `None` if there is none."""
    return getattr(model, "optimizer", None)  # a model that is not compiled has no attribute


def is_summed(loss: Any) -> bool:
    """Tells whether a loss adds up those of samples, where others average them."""
    return isinstance(loss, keras.losses.Loss) and loss.reduction == "sum"


def compiled_metrics(model: Any) -> Any:
    """Returns the metric that holds those passed to `compile`; `None` if there are none."""
    return model._compile_metrics


def initial_epoch_from(model: Any, epoch: int | None) -> None:
    """Makes `fit` start at an epoch, whatever its `initial_epoch`; `None` undoes it."""
    model._initial_epoch = epoch


def samples_weighted(loss: Any) -> Any:
    """Returns the number of samples that a mean of losses has counted; `None` of another metric."""
    return loss.count if isinstance(loss, keras.metrics.Mean) else None


def outputs_of(model: Any) -> list[Any]:
    """Returns the symbolic outputs of a functional model; none of others."""
    return list(getattr(model, "outputs", None) or ())


def has_mask(tensor: Any) -> bool:
    """Tells whether Keras has attached a mask to a tensor."""
    return masking.get_keras_mask(tensor) is not None


def may_become_ddp(model: Any) -> bool:
    """Tells whether Keras wraps a model in torch's DDP where `torch.distributed` is initialised.

    Keras 3.16 and later do, out of sight of `torch.nn.Module.modules`.
    """
    return "ddp_model" in vars(model)


def batches_in_item(count: int) -> int:
    """Returns how many batches an item of the iterator of a train function of JAX holds.

    Args:
        count: how many the function takes at once, `steps_per_execution`.
    """
    return count if _release() >= (3, 16) else 1


def drawn_seeds() -> Any:
    """Returns the state of the generator from which Keras draws without a seed, if it is made."""
    # The constant is of Keras 3.13 and later; before, its value was written out.
    name = vars(seed_generator).get("GLOBAL_SEED_GENERATOR", "global_seed_generator")
    made = global_state.get_global_attribute(name)
    return None if made is None else made.state


def global_generator() -> Any:
    """Returns the state of the generator from which Keras draws without a seed; makes it."""
    return seed_generator.global_seed_generator().state


class BatchNormalization(keras.layers.BatchNormalization):
    """Keras' layer; subclasses define `_keras_dist_moments(inputs, mask, axes)`."""

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return self._keras_dist_moments(inputs, mask, self._reduction_axes)

    def _keras_dist_moments(self, inputs: Any, mask: Any, axes: Any) -> tuple[Any, Any]:
        """Returns mean and variance; those of this rank's batch by default."""
        moments: tuple[Any, Any] = super()._moments(inputs, mask)
        return moments


# --- Callbacks

# What Keras' callbacks keep between hooks, by attribute. Callbacks that are missing keep nothing.
KEPT = {
    "BackupAndRestore": ("_batches_seen_since_last_saving", "_last_batch_seen"),
    "EarlyStopping": ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    "History": ("epoch", "history"),
    "ModelCheckpoint": ("_batches_seen_since_last_saving", "_last_batch_seen", "best"),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_test_batch", "_global_train_batch"),
}


def model_of(callback: Any) -> Any:
    """Returns the model of a callback; on JAX its `model` copies the state of the model first."""
    return callback._model


def module_of(function: Any) -> str:
    """Returns where a function is defined; the empty string where that cannot be told."""
    return getattr(function, "__module__", None) or ""  # a `functools.partial` has none


def is_part_of_keras(function: Any) -> bool:
    """Tells whether a function is defined in Keras itself."""
    return module_of(function).startswith("keras.src.")


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras' callback; subclasses define `_keras_dist_save()`, called where it would write."""

    @property
    def _keras_dist_epoch(self) -> int:
        """The epoch to go on with: this one, or the next after `on_epoch_end`."""
        epoch: int = self._current_epoch
        return epoch

    @_keras_dist_epoch.setter
    def _keras_dist_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def _save_model(self) -> None:
        self._keras_dist_save()

    def _keras_dist_save(self) -> None:
        raise NotImplementedError


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' callback; subclasses define `_keras_dist_save(path, save)`.

    It is called where Keras would write to `path`; `save()` does what Keras does, which
    may find that the model is not the best.
    """

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        logs = logs or {}
        path = self._get_file_path(epoch, batch, logs)
        write = super()._save_model

        def save() -> None:
            if self.save_best_only and self.monitor_op is None:
                self._set_monitor_op()  # Keras leaves that to the end of the first epoch
            write(epoch, batch, logs)

        self._keras_dist_save(path, save)

    def _keras_dist_save(self, path: str, save: Any) -> None:
        raise NotImplementedError


# --- The contract


def _optimizer() -> Any:
    return keras.optimizers.Optimizer


def _scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer


def _layer() -> Any:
    return keras.layers.Layer


def _model() -> Any:
    return keras.Model


def _normalization() -> Any:
    return keras.layers.BatchNormalization


def _backup() -> Any:
    return keras.callbacks.BackupAndRestore


def _checkpoint() -> Any:
    return keras.callbacks.ModelCheckpoint


def _logger() -> Any:
    return keras.callbacks.CSVLogger


def _list() -> Any:
    return keras.callbacks.CallbackList


def _on(backend: str) -> Any:
    return lambda: keras.backend.backend() == backend


NOT_REDUCED = "each rank would train by its own gradients"
ORDER = "the reduction would come at another place"
STATE = "state of the optimizer would be missing in broadcasts and checks"
RESUMED = "a resumed fit would not be equal to one without interruption"
EPOCH_LOGS = "metrics of an epoch would be those of one rank"

CONTRACT = (
    Name(
        _optimizer,
        "_clip_gradients",
        "to reduce gradients before they are clipped",
        NOT_REDUCED,
        ("grads",),
    ),
    Name(
        _optimizer,
        "_backend_apply_gradients",
        "to learn which variables the gradients are of",
        NOT_REDUCED,
        ("grads", "trainable_variables"),
    ),
    Name(
        _optimizer,
        "_backend_update_step",
        "to check that the gradients of an update are reduced",
        "an update by the gradients of one rank might stay unnoticed",
        ("grads", "trainable_variables", "learning_rate"),
    ),
    Name(
        _optimizer,
        "_backend_reset_gradient_accumulators",
        "to clear accumulated gradients that have overflowed",
        "NaN would stay in them on torch",
        (),
    ),
    Name(
        _optimizer,
        "apply",
        "to reduce the gradients of an optimizer with an apply of its own",
        NOT_REDUCED,
        ("grads", "trainable_variables"),
    ),
    Name(
        _optimizer,
        "apply_gradients",
        "to reduce the gradients of an optimizer with an apply_gradients of its own",
        NOT_REDUCED,
        ("grads_and_vars",),
    ),
    Name(
        _optimizer,
        "stateless_apply",
        "to reduce the gradients of an optimizer with a stateless_apply of its own",
        NOT_REDUCED,
        ("optimizer_variables", "grads", "trainable_variables"),
    ),
    Name(
        _optimizer,
        "_trainable_variables",
        "to learn which variables an optimizer is built for",
        STATE,
        instance=True,
    ),
    Name(
        _optimizer,
        "_accumulated_gradients",
        "to leave accumulated gradients, which differ from rank to rank, out of broadcasts",
        "they would be broadcast and verified",
        instance=True,
    ),
    Name(
        _optimizer,
        "_variables",
        "to tell the list of all its variables from those of slots",
        STATE,
        instance=True,
    ),
    Name(
        _optimizer,
        "_iterations",
        "to count batches under gradient accumulation",
        ORDER,
        instance=True,
    ),
    Name(
        _optimizer,
        "gradient_accumulation_steps",
        "for backward_passes_per_step",
        ORDER,
        instance=True,
    ),
    Name(
        _optimizer,
        "_learning_rate",
        "to find a schedule in the optimizer",
        "a schedule and a callback would both set the rate",
        instance=True,
    ),
    Name(
        lambda: keras.optimizers.SGD,
        "momentums",
        "to scale velocities when the learning rate changes",
        "velocities would not be scaled",
        instance=True,
    ),
    Name(
        lambda: functional.Functional,
        "outputs",
        "to refuse masks between stages of a pipeline",
        "masks would be dropped there",
    ),
    Name(
        _optimizer,
        "_get_variable_index",
        "to find the momentum of a variable in LARS",
        "LARS could not make a step",
        ("variable",),
    ),
    Name(
        _optimizer,
        "_use_weight_decay",
        "to respect exclude_from_weight_decay in LARS",
        "LARS could not be built",
        ("variable",),
    ),
    Name(
        _optimizer,
        "_apply_weight_decay",
        "to keep Keras from applying the decay that is part of a step of LARS",
        "the decay would be applied twice",
        ("variables",),
    ),
    Name(
        _optimizer,
        "_unpickle_model",
        "to pickle and copy a distributed optimizer",
        "a copy would not be distributed",
        ("bytesio",),
    ),
    Name(
        _optimizer,
        TF_UPDATE,
        "to compile the update of variables for XLA",
        "training with jit_compile would fail",
        ("distribution", "grads_and_vars", "learning_rate"),
        applies=_on("tensorflow"),
    ),
    Name(
        _scaled,
        "inner_optimizer",
        "to find the optimizer to which the gradients go",
        "ranks would skip different steps",
        instance=True,
    ),
    Name(
        _scaled,
        "check_finite",
        "to make all ranks skip the same steps",
        "ranks would skip different steps",
        ("grads",),
    ),
    Name(
        _scaled,
        "_stateless_handle_finite_grads",
        "to make a step outside of a branch",
        "a step of JAX could not be reduced",
        ("optimizer_variables", "grads", "trainable_variables"),
    ),
    Name(
        _scaled,
        "_stateless_handle_non_finite_grads",
        "to skip a step outside of a branch",
        "a step of JAX could not be reduced",
        ("optimizer_variables", "trainable_variables"),
    ),
    Name(
        lambda: keras.optimizers,
        "MultiOptimizer",
        "to reduce the gradients of all its optimizers",
        NOT_REDUCED,
        applies=lambda: _release() >= (3, 15),
    ),
    Name(
        _layer,
        "_flatten_layers",
        "to inspect all layers of a model",
        "layers that ranks must not share would not be found",
        (),
    ),
    Name(
        _model,
        "make_train_function",
        "to prepare a model before its step is made",
        NOT_REDUCED,
        ("force",),
    ),
    Name(
        _model,
        "optimizer",
        "to find the optimizers of a model",
        "broadcasts and checks would leave them out",
        instance=True,
    ),
    Name(
        lambda: keras.losses.Loss,
        "reduction",
        "to add up the losses of micro-batches as the loss does",
        "a summed loss would be averaged in a pipeline",
        instance=True,
    ),
    Name(
        lambda: keras.metrics.Mean,
        "count",
        "to count the samples of an epoch",
        "the throughput would be missing in the logs",
        instance=True,
    ),
    Name(
        _model,
        "train_function",
        "to take part in the first step of a fit",
        "models that are not built would start from different weights",
        instance=True,
    ),
    Name(
        _model,
        "jit_compile",
        "to compile a step around the reduction",
        "XLA would compile the reduction, which it cannot",
        instance=True,
    ),
    Name(
        _model,
        "stop_training",
        "to stop all ranks together",
        "ranks would wait for one that has stopped",
        instance=True,
    ),
    Name(
        _model,
        "ddp_model",
        "to refuse a model whose gradients Keras averages over processes",
        "gradients would be averaged twice",
        instance=True,
        applies=lambda: _release() >= (3, 16) and keras.backend.backend() == "torch",
    ),
    Name(_model, LOGS, "to compute the logs of all ranks", EPOCH_LOGS, ("logs",)),
    Name(
        _model,
        "_compile_metrics",
        "to name metrics that are averaged",
        "a warning would be missing",
        instance=True,
    ),
    Name(
        _model,
        "_initial_epoch",
        "to resume a fit at the epoch of a backup",
        "a resumed fit would start at its first epoch",
        instance=True,
    ),
    Name(
        lambda: masking,
        "get_keras_mask",
        "to refuse masks between stages of a pipeline",
        "masks would be dropped there",
        ("x",),
    ),
    Name(
        lambda: global_state,
        "get_global_attribute",
        "to back up the generator of random numbers",
        RESUMED,
        ("name",),
    ),
    Name(
        lambda: seed_generator,
        "GLOBAL_SEED_GENERATOR",
        "to back up the generator of random numbers",
        RESUMED,
        applies=lambda: _release() >= (3, 13),
    ),
    Name(
        lambda: seed_generator,
        "global_seed_generator",
        "to restore the generator of random numbers",
        RESUMED,
        (),
    ),
    Name(
        _normalization,
        "_moments",
        "to normalise by the batches of all ranks",
        "SyncBatchNormalization would normalise by the batch of its rank",
        ("inputs", "mask"),
    ),
    Name(
        _normalization,
        "_reduction_axes",
        "to normalise by the batches of all ranks",
        "SyncBatchNormalization would fail",
        instance=True,
    ),
    Name(
        lambda: keras.callbacks.Callback,
        "_model",
        "to reach the model of a callback within a step",
        "each batch would copy the state of a model of JAX",
        instance=True,
    ),
    Name(
        _list,
        "callbacks",
        "to tell callbacks of the others in their list",
        RESUMED,
        instance=True,
    ),
    *(
        Name(_list, hook, "to act behind all callbacks of a list", RESUMED, given)
        for hook, given in {
            "on_train_begin": ("logs",),
            "on_train_end": ("logs",),
            "on_epoch_begin": ("epoch", "logs"),
            "on_epoch_end": ("epoch", "logs"),
            "on_train_batch_begin": ("batch", "logs"),
            "on_train_batch_end": ("batch", "logs"),
        }.items()
    ),
    Name(
        _backup,
        "_save_model",
        "to write a backup on the root alone",
        "every rank would write, in the format of Keras",
        (),
    ),
    Name(
        _backup,
        "_current_epoch",
        "to note the epoch of a backup",
        RESUMED,
        instance=True,
    ),
    Name(
        _checkpoint,
        "_save_model",
        "to write a checkpoint on the root alone",
        "every rank would write",
        ("epoch", "batch", "logs"),
    ),
    Name(
        _checkpoint,
        "_get_file_path",
        "to name the checkpoint in messages",
        "checkpoints could not be written",
        ("epoch", "batch", "logs"),
    ),
    Name(
        _checkpoint,
        "_set_monitor_op",
        "to decide within an epoch which model is the best",
        "save_best_only with a number as save_freq would fail",
        (),
        applies=lambda: _release() >= (3, 11),  # before, it was decided at once
    ),
    *(
        Name(_logger, name, "to append to the file in a resumed fit", RESUMED, instance=True)
        for name in ("append", "append_header", "filename", "keys")
    ),
    *(
        Name(
            functools.partial(getattr, keras.callbacks, kind),
            name,
            "to keep the state of a callback in a backup",
            RESUMED,
            instance=True,
        )
        for kind, kept in KEPT.items()
        for name in kept
    ),
)
