"""Every rank starts from the root's weights and optimizer state."""

import warnings
from collections.abc import Iterable
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.model_state import keep_local
from keras_dist.training.replicas import broadcast_state, build_optimizers_alike, separate_seeds

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the root's weights and optimizer state before the first step of a fit.

    A model that is not built yet is built from the shapes of its data, so that the first
    step already starts from equal weights. The states of random generators are derived from
    the root's, another for each rank, so that dropout differs from rank to rank. Where no
    optimizer of the model is distributed, the root warns.

    Collective: every rank must pass it to `fit`; it acts in every fit.

    Args:
        root_rank: the rank whose state all receive. Defaults to 0.
        device: accepted for scripts written for Horovod; has no effect.
        local_variables: variables that each rank keeps for itself: a Keras variable or a
            collection of them. Defaults to none.

    Raises:
        ArgumentError: `root_rank` is not a rank.
        ArgumentTypeError: `local_variables` holds something else.
        MismatchError: the ranks built different models; raised on every rank, by `fit`.
    """

    def __init__(
        self, root_rank: int = 0, device: str = "", local_variables: Any | Iterable[Any] = ()
    ):
        super().__init__()
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank
        self.local_variables = _variables(local_variables)

    def register_local_var(self, variable: Any) -> None:
        """Adds a variable that each rank keeps for itself."""
        self.local_variables.append(variable)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts now, or, when there are no variables yet, once the data is at hand."""
        if runtime.size() == 1:
            return
        keep_local(self.model, self.local_variables)
        if runtime.rank() == self.root_rank:
            _warn_of_plain_optimizer(self.model)
        if self.model.built:
            self._broadcast()
        else:
            self._broadcast_before_first_step()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch, for messages."""
        _engine.progress.begin_epoch(epoch)

    def _broadcast(self) -> None:
        model = self.model
        if model.optimizer is None:
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    f"model {model.name!r} to be compiled with an optimizer",
                    "none",
                    "Pass optimizer=keras_dist.DistributedOptimizer(...) to compile.",
                )
            )
        build_optimizers_alike(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        broadcast_state(model, self.root_rank)
        separate_seeds(model, self.root_rank)

    def _broadcast_before_first_step(self) -> None:
        model = self.model
        step = model.train_function

        def first_step(batches: Any) -> Any:
            model.train_function = step
            _backends.active().build_from(model, batches)
            self._broadcast()
            return step(batches)

        model.train_function = first_step


def _variables(given: Any) -> list[Any]:
    """Returns one variable, a collection of them or `None` as a list.

    Raises:
        ArgumentTypeError: there is something else.
    """
    single = hasattr(given, "assign")
    several = isinstance(given, Iterable) and not single
    listed = list(given) if several else [] if given is None else [given]
    for one in listed:
        if not hasattr(one, "assign"):
            raise errors.ArgumentTypeError(
                errors.explain(
                    runtime.where(),
                    "local_variables to be a Keras variable or a list of variables",
                    f"{one!r} of type {type(one).__name__}",
                    "Pass for example local_variables=model.layers[0].trainable_variables.",
                )
            )
    return listed


def _warn_of_plain_optimizer(model: keras.Model) -> None:
    optimizer = model.optimizer
    if optimizer is None or distributed_optimizers(model):
        return
    warnings.warn(
        errors.explain(
            runtime.where(),
            f"the optimizer of model {model.name!r} to be distributed",
            f"a plain {type(optimizer).__name__}; each rank goes its own way",
            "Pass optimizer=keras_dist.DistributedOptimizer(...) to compile, unless train_step "
            "averages gradients itself.",
        ),
        RuntimeWarning,
        stacklevel=2,
    )
