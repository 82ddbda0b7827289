"""Broadcast of the root's weights and optimizer state at the start of training."""

from collections.abc import Iterable
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist.callbacks.optimizers_alike import compare_optimizers
from keras_dist.training import layer_state
from keras_dist.training.model_state import has_weights, keep_local
from keras_dist.training.replicas import broadcast_state, build_optimizers_alike
from keras_dist.training.seeds import separate_in_fit
from keras_dist.training.traced_steps import before_first_step
from keras_dist.training.trainer import watch_models


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the root's weights, layer and optimizer state before the first step of `fit`.

    The state of layers is what they compute with besides their variables, such as a vocabulary, see
    `keras_dist.verify_replicas`; ranks may differ in it before, for example if only the root has
    called `adapt`. Steps that were traced with other constants are traced again.

    A model that is not built is built from the shapes of its data first. Each rank draws its own
    random numbers in the steps of `fit`, such as masks of dropout, see `separate_seeds`. The root
    warns if ranks have other hyperparameters than the root, such as those that each rank of a
    search has drawn: all ranks train with the learning rate of the root. A model without a
    distributed optimizer is refused; if it has a `train_step` of its own, which may average
    gradients, the root warns.

    Collective: every rank must pass the callback to `fit`. It broadcasts in every `fit`.

    Args:
        root_rank: rank whose state is broadcast. Defaults to 0.
        device: ignored; accepted for compatibility with Horovod.
        local_variables: a Keras variable, or a collection of Keras variables, that are not
            broadcast. Defaults to `()`.

    Raises:
        ArgumentError: `root_rank` is not a rank. In `fit`: the model has no optimizer.
        ArgumentTypeError: `local_variables` contains an object that is not a variable.
        MismatchError: the ranks built different models, or a layer cannot take the state of the
            root; raised on every rank, by `fit`.
        UsageError: no optimizer of the model is distributed; raised on every rank, by `fit`.

    Example:

    ```python
    broadcast = keras_dist.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)
    model.fit(dataset, callbacks=[broadcast])
    ```
    """

    def __init__(
        self, root_rank: int = 0, device: str = "", local_variables: Any | Iterable[Any] = ()
    ):
        super().__init__()
        runtime.communicator().index_of_root(root_rank)
        watch_models()  # steps draw from streams of their own, until the end of `fit`
        self.root_rank = root_rank
        self.local_variables = _variables(local_variables)

    def register_local_var(self, variable: Any) -> None:
        """Excludes a variable from the broadcast."""
        self.local_variables.append(variable)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts at once, or before the first step if the model is not built."""
        if runtime.size() == 1:
            return
        keep_local(self.model, self.local_variables)
        compare_optimizers(self.model, self.root_rank)
        if self.model.built:
            self._broadcast()
        else:
            self._broadcast_before_first_step()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the epoch for error messages."""
        _engine.progress.begin_epoch(epoch)

    def _broadcast(self) -> None:
        model = self.model
        if model.optimizer is None:
            raise errors.ArgumentError(
                runtime.where(),
                f"model {model.name!r} to be compiled with an optimizer",
                "none",
                "Pass optimizer=keras_dist.DistributedOptimizer(...) to compile.",
            )
        build_optimizers_alike(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        broadcast_state(model, self.root_rank)
        separate_in_fit(model, self.root_rank)

    def _broadcast_before_first_step(self) -> None:
        model = self.model

        def build_and_broadcast(batches: Any) -> Any:
            _build(model, batches)
            self._broadcast()
            return model.train_function(batches)

        before_first_step(model, build_and_broadcast)


def _build(model: keras.Model, batches: Any) -> None:
    """Creates the variables of a model, from the shapes of a batch."""
    try:
        _backends.active().build_from(model, batches)
    except errors.ArgumentError:
        if not (has_weights(model) and layer_state.is_stateful(model)):
            raise
        # TensorFlow builds layers in a graph, which their constants must not belong to.
        layer_state.refresh(model)
        _backends.active().build_from(model, batches)


def _variables(given: Any) -> list[Any]:
    """Returns a variable, a collection of variables or `None` as a list."""
    single = hasattr(given, "assign")
    several = isinstance(given, Iterable) and not single
    variables = list(given) if several else [] if given is None else [given]
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise errors.ArgumentTypeError(
                runtime.where(),
                "local_variables to be a Keras variable or a list of variables",
                f"{variable!r} of type {type(variable).__name__}",
                "Pass for example local_variables=model.layers[0].trainable_variables.",
            )
    return variables
