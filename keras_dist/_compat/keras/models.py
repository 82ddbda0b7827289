"""Names of Keras: models, layers and losses."""

from typing import Any

import keras

from keras_dist._compat.contract import Owner, require
from keras_dist._compat.keras.versions import release, uses, version

# The method of a model that turns the logs of the last batch into those of the epoch.
LOGS = "_get_metrics_result_or_logs"
# Attribute of a layer: whether it has been called.
CALLED = "_called"


def layers_of(model: Any) -> list[Any]:
    """Returns a model and all layers in it, also those in Keras' lists and dicts."""
    layers: list[Any] = model._flatten_layers()
    return layers


def is_built(model: Any) -> bool:
    """Returns whether the weights of a model exist."""
    # `build` of Keras, on a class that does not define it, only marks the model as built: its
    # layers get their weights when the model is called.
    if not model.built or vars(model).get(CALLED, True):
        return bool(model.built)
    is_marked = type(model).build is keras.Model.build
    return not is_marked or all(layer.built for layer in layers_of(model))


def has_weights(model: Any) -> bool:
    """Returns whether the weights of a model exist, also of one that only has built layers."""
    layers = [layer for layer in layers_of(model) if layer is not model]
    return is_built(model) or (bool(layers) and all(layer.built for layer in layers))


def is_trainer(layer: Any) -> bool:
    """Returns whether a layer has `fit`: a model, or another class with Keras' trainer in it."""
    return hasattr(layer, "make_train_function")


def optimizer_of(model: Any) -> Any:
    """Returns the optimizer that a model is compiled with; `None` if there is none."""
    return getattr(model, "optimizer", None)  # a model that is not compiled has no attribute


def initial_epoch_from(model: Any, epoch: int | None) -> None:
    """Overrides the `initial_epoch` of the next `fit`; `None` removes the override."""
    model._initial_epoch = epoch


def outputs_of(model: Any) -> list[Any]:
    """Returns the symbolic outputs of a functional model; an empty list for other models."""
    require(OUTPUTS, version)
    return list(getattr(model, "outputs", None) or ())


def may_become_ddp(model: Any) -> bool:
    """Returns whether Keras wraps a model in torch's DDP if `torch.distributed` is initialised."""
    # Keras 3.16 and later do. `torch.nn.Module.modules` does not show the wrapper.
    return "ddp_model" in vars(model)


def batches_in_item(count: int) -> int:
    """Returns the number of batches in an item of the iterator of a JAX train function."""
    return count if release() >= (3, 16) else 1


class BatchNormalization(keras.layers.BatchNormalization):
    """Keras' layer. Subclasses define `_keras_dist_moments(inputs, mask, axes)`."""

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return self._keras_dist_moments(inputs, mask, self._reduction_axes)

    def _keras_dist_moments(self, inputs: Any, mask: Any, axes: Any) -> tuple[Any, Any]:
        """Returns mean and variance. Defaults to those of this rank's batch."""
        moments: tuple[Any, Any] = super()._moments(inputs, mask)
        return moments


MODEL = Owner("keras:Model")
NORMALIZATION = Owner("keras:layers.BatchNormalization")
OUTPUTS = Owner("keras.src.models.functional:Functional").attribute(
    "outputs",
    "to tell losses of samples from others by the shape of outputs",
    "losses of pairs of samples would be divided by a wrong number",
    on_use=True,
)

CONTRACT = (
    OUTPUTS,
    Owner("keras:layers.Layer").method(
        "_flatten_layers()",
        "to inspect all layers of a model",
        "layers that ranks must not share would not be found",
    ),
    Owner("keras:layers.Layer").attribute(
        CALLED,
        "to build a model before its first step",
        "the step of a model that is only marked as built would fail",
    ),
    MODEL.method(
        "make_train_function(force)",
        "to prepare a model before its train step is made",
        "each rank would train by its own gradients",
    ),
    MODEL.attribute(
        "optimizer", "to find the optimizers of a model", "broadcasts and checks would omit them"
    ),
    MODEL.attribute(
        "train_function",
        "to take part in the first step of a fit",
        "models that are not built would start from different weights",
    ),
    MODEL.attribute(
        "jit_compile",
        "to compile a step around the reduction",
        "XLA would compile the reduction, which it cannot",
    ),
    MODEL.attribute(
        "stop_training",
        "to stop all ranks together",
        "the other ranks would wait for a rank that has stopped",
    ),
    MODEL.attribute(
        "ddp_model",
        "to refuse a model whose gradients Keras averages over processes",
        "gradients would be averaged twice",
        applies=lambda: release() >= (3, 16) and uses("torch"),
    ),
    MODEL.method(
        f"{LOGS}(logs)",
        "to compute the logs of all ranks",
        "metrics of an epoch would be those of one rank",
    ),
    MODEL.attribute(
        "_initial_epoch",
        "to resume a fit at the epoch of a backup",
        "a resumed fit would start at its first epoch",
    ),
    NORMALIZATION.method(
        "_moments(inputs, mask)",
        "to normalise by the batches of all ranks",
        "SyncBatchNormalization would normalise by the batch of its rank",
    ),
    NORMALIZATION.attribute(
        "_reduction_axes",
        "to normalise by the batches of all ranks",
        "SyncBatchNormalization would fail",
    ),
)
