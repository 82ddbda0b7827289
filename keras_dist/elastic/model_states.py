"""Elastic states of models and optimizers: of Keras on every backend, and of torch."""

import copy
import io
import json
import pickle
import re
from typing import Any

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.elastic.object_state import ObjectState

OPTIMIZERS = "optimizers"  # key of the description of the optimizers


class _VariablesState(ObjectState):
    """A state of variables of any dtype, and of named values."""

    def _variables(self) -> list[Any]:
        raise NotImplementedError

    def _own(self) -> set[str]:
        """Returns the indices of the variables that are local to each rank."""
        return set()

    def _without_own(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        own = self._own()
        return {index: raw for index, raw in arrays.items() if index not in own}

    def _arrays(self) -> dict[str, np.ndarray]:
        from keras_dist.training.model_state import bytes_of

        return {str(index): bytes_of(v) for index, v in enumerate(self._variables())}

    def _put_arrays(self, arrays: dict[str, np.ndarray], of_file: bool = False) -> None:
        from keras_dist.training.model_state import to_numpy

        own = self._own()
        for index, variable in enumerate(self._variables()):
            if str(index) in own and str(index) not in arrays:
                continue  # the state is of another rank, or from a directory
            raw = np.ascontiguousarray(arrays[str(index)])
            variable.assign(raw.view(to_numpy(variable).dtype).reshape(variable.shape))


class KerasState(_VariablesState):
    """The weights of a model, the state of its optimizer, and named values.

    Accumulated gradients that have not been applied are local to each rank: `restore` restores
    them, `sync` does not change them, and a directory does not contain them.

    Args:
        model: a built Keras model.
        optimizer: the optimizer. Defaults to that of the model.
        directory: as for `ObjectState`.
        **attributes: as for `ObjectState`, such as `epoch=0, batch=0`.

    Raises:
        ArgumentError: the model is not built, or its optimizer has `shard_state=True`.
    """

    _described: Any = None  # the optimizers of a state, while it is restored

    def __init__(self, model: Any, optimizer: Any = None, directory: Any = None, **attributes: Any):
        from keras_dist._compat.keras.models import has_weights

        if not has_weights(model):
            expected, received = "a built model", f"{model.name!r}, which is not built"
            remedy = "Call it on a batch before the state is made."
            raise errors.ArgumentError(expected, received, remedy)
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        reduction = getattr(self.optimizer, "_keras_dist", None)
        if reduction is not None and reduction.options.shard_state:
            expected, received = "an optimizer with whole state on each rank", "shard_state=True"
            remedy = "Omit shard_state: a rank that is lost takes its slice with it."
            raise errors.ArgumentError(expected, received, remedy)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(directory=directory, **attributes)

    def _variables(self) -> list[Any]:
        from keras_dist.training.built_optimizers import describe, variables_of

        own = [] if self.optimizer is None else self.optimizer.variables
        held = variables_of(self.model, self._described or describe(self.model))
        return list({id(variable): variable for variable in [*held, *own]}.values())

    def _arrays(self) -> dict[str, np.ndarray]:
        from keras_dist.resume.variables import write_layers
        from keras_dist.training.built_optimizers import describe

        described = np.frombuffer(json.dumps(describe(self.model)).encode(), np.uint8)
        return {**super()._arrays(), OPTIMIZERS: described, **write_layers(self.model)}

    def _put_arrays(self, arrays: dict[str, np.ndarray], of_file: bool = False) -> None:
        from keras_dist.resume.variables import restore_layers
        from keras_dist.training import built_optimizers
        from keras_dist.training.model_state import (
            clear_errors,
            optimizers_inside,
            optimizers_of,
            rounds_of,
        )

        text = arrays[OPTIMIZERS].tobytes() if OPTIMIZERS in arrays else b"null"
        self._described = json.loads(text)
        described = self._described or built_optimizers.describe(self.model)
        built_optimizers.build(self.model, described)
        super()._put_arrays(arrays, of_file)
        restore_layers(self.model, arrays, is_root=True)
        if self.optimizer is not None:
            clear_errors([self.optimizer, *optimizers_inside(self.optimizer)])
        for rounds in filter(None, map(rounds_of, [*optimizers_of(self.model), self.optimizer])):
            rounds.restart()
        self._described = None
        built_optimizers.reset_undescribed(self.model, described)

    def _own(self) -> set[str]:
        from keras_dist.training.model_state import accumulators, optimizers_inside

        if self.optimizer is None:
            return set()
        optimizers = [self.optimizer, *optimizers_inside(self.optimizer)]
        own = {id(variable) for variable in accumulators(optimizers)}
        return {str(index) for index, v in enumerate(self._variables()) if id(v) in own}


class TensorFlowKerasState(KerasState):
    """A `KerasState` with the arguments of Horovod.

    Args:
        model: as for `KerasState`.
        optimizer: as for `KerasState`.
        backend: ignored: Keras 3 has one backend for all models.
        directory: as for `ObjectState`.
        **attributes: as for `ObjectState`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,
        directory: Any = None,
        **attributes: Any,
    ):
        super().__init__(model, optimizer, directory, **attributes)


class TensorFlowState(_VariablesState):
    """The values of TensorFlow variables, and named values.

    Args:
        variables: the variables, in the same order on every rank. Defaults to `None`: none.
        session: ignored: TensorFlow 2 has no sessions.
        directory: as for `ObjectState`.
        **attributes: as for `ObjectState`.
    """

    def __init__(
        self, variables: Any = None, session: Any = None, directory: Any = None, **attributes: Any
    ):
        self.variables = list(variables or ())
        super().__init__(directory=directory, **attributes)

    def _variables(self) -> list[Any]:
        return self.variables


class TorchState(ObjectState):
    """The state of modules, optimizers and samplers of torch, and named values.

    Of an object with `state_dict` and `load_state_dict` only the state is kept. The processed
    indices of an `ElasticSampler` are merged over the ranks at each commit and `sync`: with a
    sampler, a commit blocks.

    Args:
        model: a module. Defaults to `None`.
        optimizer: an optimizer. Defaults to `None`.
        directory: as for `ObjectState`; `torch.load(weights_only=True)` must be able to read each
            `state_dict`.
        **attributes: further modules, optimizers, schedulers and samplers, and values as for
            `ObjectState`.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, directory: Any = None, **attributes: Any
    ):
        self.model, self.optimizer = model, optimizer
        further = [
            name for name, attribute in attributes.items() if hasattr(attribute, "load_state_dict")
        ]
        self._parts = ["model", "optimizer", *further]
        for name in further:
            setattr(self, name, attributes.pop(name))
        super().__init__(directory=directory, **attributes)

    def _gather(self) -> None:
        for name in self._parts:
            part = getattr(self, name)
            if hasattr(part, "processed_indices"):
                done = _engine.collectives.allgather_object(
                    runtime.communicator(), part.processed_indices, operation=f"gathering {name}"
                )
                # Not `load_state_dict`, which would shard again during an iteration.
                part.processed_indices = set().union(*done)

    def _arrays(self) -> dict[str, np.ndarray]:
        import torch

        found = {}
        for name in self._parts:
            part = getattr(self, name)
            if part is not None:
                file = io.BytesIO()
                torch.save(_without_numpy_scalars(part.state_dict()), file)
                found[name] = np.frombuffer(file.getvalue(), np.uint8)
        return found

    def _put_arrays(self, arrays: dict[str, np.ndarray], of_file: bool = False) -> None:
        for name, raw in arrays.items():
            getattr(self, name).load_state_dict(_loaded(raw, of_file))

    def _check(self) -> None:
        if runtime.rank() == 0:  # the rank that writes
            for name, raw in self._kept[1].items():
                _check_part(name, raw)


def _loaded(raw: np.ndarray, of_file: bool) -> Any:
    """Returns a `state_dict`; reading one from a file executes no code."""
    import torch

    # On the CPU: the device of the root may not exist here.
    return torch.load(io.BytesIO(raw.tobytes()), map_location="cpu", weights_only=of_file)


def _check_part(name: str, raw: np.ndarray) -> None:
    try:
        _loaded(raw, of_file=True)
    except pickle.UnpicklingError as error:
        expected = f"torch.load(weights_only=True) to read the state_dict of {name}, in a "
        remedy = (
            "Keep only tensors, numbers, strings and containers of them in it, or allow the class "
            "with torch.serialization.add_safe_globals."
        )
        raise errors.ArgumentTypeError(
            f"{expected}state with a directory", _rejected_class(error), remedy
        ) from error


def _rejected_class(error: pickle.UnpicklingError) -> str:
    """Returns the class that torch has refused, from its long message."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return str(error).partition("\n")[0] if found is None else f"{found[1]} in it"


def _without_numpy_scalars(value: Any) -> Any:
    """Returns a `state_dict` with Python numbers instead of numpy scalars."""
    # torch refuses to read numpy scalars, such as a rate computed by numpy, from a file.
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple, set):
        return type(value)(_without_numpy_scalars(item) for item in value)
    if isinstance(value, dict):
        plain = copy.copy(value)  # keeps the attributes of torch's dicts
        plain.clear()
        for key, item in value.items():
            plain[_without_numpy_scalars(key)] = _without_numpy_scalars(item)
        return plain
    return value
