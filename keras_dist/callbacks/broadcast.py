"""Broadcast of the root's weights and optimizer state at the start of training."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.callbacks import is_part_of_keras
from keras_dist._compat.keras.models import has_weights, is_built
from keras_dist.training import layer_state
from keras_dist.training.fit_session import FirstStep
from keras_dist.training.model_state import families, keep_local, optimizers_of
from keras_dist.training.random_generators import separate_in_fit
from keras_dist.training.rank_exchanges import allgather_object
from keras_dist.training.replicas import broadcast_state, build_optimizers_alike
from keras_dist.training.saved_options import KeepsOptions, plain_config
from keras_dist.training.session_callback import SessionCallback

WRAP = (
    "Pass optimizer=keras_dist.DistributedOptimizer(...) to compile, and load models by "
    "keras_dist.load_model."
)


class BroadcastGlobalVariablesCallback(SessionCallback):
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
        self.root_rank = root_rank
        self.local_variables = _variables(local_variables)

    def register_local_var(self, variable: Any) -> None:
        """Excludes a variable from the broadcast."""
        self.local_variables.append(variable)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts at once, or before the first step if the model is not built."""
        if runtime.fit_size() == 1:
            return
        keep_local(self.model, self.local_variables)
        is_loop = self.session.task == "loop"
        built = is_built(self.model) or (is_loop and self.session.is_built)
        if self._agree(built):
            self._broadcast()
        elif is_loop:
            self.session.when_built = self._build_and_broadcast
        else:
            self.session.before_first_step(FirstStep.BROADCAST, self._build_and_broadcast)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        _engine.progress.begin_epoch(epoch)

    def _broadcast(self) -> None:
        model = self.model
        if model.optimizer is None:
            raise errors.ArgumentError(
                f"model {model.name!r} to be compiled with an optimizer",
                "none",
                "Pass optimizer=keras_dist.DistributedOptimizer(...) to compile.",
            )
        build_optimizers_alike(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        broadcast_state(model, self.root_rank)
        separate_in_fit(model, self.root_rank)

    def _build_and_broadcast(self, *arguments: Any) -> tuple[Any, ...]:
        if arguments and not is_built(self.model):
            _build(self.model, arguments[-1])
        self._broadcast()
        return arguments

    def _agree(self, built: bool) -> bool:
        """Compares optimizers with the root's; returns whether the model is built on all ranks."""
        model, comm, optimizers = self.model, runtime.fit_communicator(), optimizers_of(self.model)
        is_distributed = any(isinstance(optimizer, KeepsOptions) for optimizer in optimizers)
        mine = is_distributed, hyperparameters(model), built
        everyone = allgather_object(mine, "the comparison of optimizers")
        are_distributed, values, are_built = zip(*everyone, strict=True)
        if any(are_distributed) and not all(are_distributed):
            plain, other = are_distributed.index(False), are_distributed.index(True)
            raise errors.MismatchError(
                f"[rank {plain} of {comm.size}]",
                f"the optimizer of model {model.name!r} to be distributed",
                f"a plain one, while that of rank {other} is distributed",
                WRAP,
            )
        if not is_distributed and optimizers:
            self._refuse_plain(optimizers[0])
        self._warn_of_differences(dict(zip(comm.ranks, values, strict=True)))
        # `adapt` on the root alone may have built a layer.
        return all(are_built)

    def _refuse_plain(self, optimizer: keras.optimizers.Optimizer) -> None:
        own_step = not is_part_of_keras(type(self.model).train_step)
        parts = (
            f"the optimizer of model {self.model.name!r} to be distributed",
            f"a plain {type(optimizer).__name__}; gradients are not averaged",
            f"{WRAP} Ignore this warning if train_step averages gradients itself."
            if own_step
            else f"{WRAP} To train another model on each rank, omit the callbacks of keras_dist.",
        )
        if not own_step:
            raise errors.UsageError(*parts)
        self.warn(*parts)

    def _warn_of_differences(self, values: Mapping[int, dict[str, str]]) -> None:
        root, expected = self.root_rank, values[self.root_rank]
        differing = [
            f"{name}={value} on rank {rank}, where rank {root} has {expected[name]}"
            for rank, mine in values.items()
            for name, value in mine.items()
            if expected.get(name, value) != value
        ]
        if differing:
            self.warn(
                "optimizers with equal hyperparameters on all ranks",
                "; ".join(differing[:8]),
                f"All ranks train with the learning rate of rank {root}; other values stay, and "
                "replicas differ. In a search, draw on one rank and call "
                "keras_dist.broadcast_object, or train each trial on a process set.",
            )


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
                "local_variables to be a Keras variable or a list of variables",
                f"{variable!r} of type {type(variable).__name__}",
                "Pass for example local_variables=model.layers[0].trainable_variables.",
            )
    return variables


def hyperparameters(model: keras.Model) -> dict[str, str]:
    """Returns the hyperparameters of the optimizers of a model, as text by name."""
    found: dict[str, str] = {}
    for number, (optimizer, *_) in enumerate(families(model)):
        prefix = f"optimizer {number + 1}: " if number else ""
        with contextlib.suppress(Exception):  # a class of the user may have no configuration
            _collect(found, prefix, plain_config(optimizer))
    return found


def _collect(found: dict[str, str], prefix: str, config: dict[str, Any]) -> None:
    for name, value in config.items():
        if isinstance(value, dict) and isinstance(value.get("config"), dict):
            _collect(found, f"{prefix}{name}.", value["config"])  # of a schedule, or inside
        elif name != "name" and " at 0x" not in repr(value):
            found[prefix + name] = f"{value:.7g}" if isinstance(value, float) else repr(value)
