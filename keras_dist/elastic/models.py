"""States of models and their optimizers: Keras' on every backend, torch's own."""

import copy
import io
import json
import pickle
import re
from typing import Any

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.elastic.state import ObjectState

__all__ = ["KerasState", "TensorFlowKerasState", "TensorFlowState", "TorchState"]

OPTIMIZERS = "optimizers"  # among the arrays: for which variables each was built


class _VariablesState(ObjectState):
    """A state of variables, whatever their dtypes, and of named values."""

    def _variables(self) -> list[Any]:
        raise NotImplementedError

    def _own(self) -> list[Any]:
        """Returns those of the variables that each rank has for itself."""
        return []

    def _without_own(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        own = self._places_of_own()
        return {place: raw for place, raw in arrays.items() if place not in own}

    def _places_of_own(self) -> set[str]:
        own = {id(one) for one in self._own()}
        return {str(place) for place, one in enumerate(self._variables()) if id(one) in own}

    def _arrays(self) -> dict[str, np.ndarray]:
        from keras_dist.training.model_state import bytes_of

        return {str(place): bytes_of(one) for place, one in enumerate(self._variables())}

    def _put_arrays(self, arrays: dict[str, np.ndarray], of_file: bool = False) -> None:
        from keras_dist.training.model_state import to_numpy

        own = self._places_of_own()
        for place, one in enumerate(self._variables()):
            if str(place) in own and str(place) not in arrays:
                continue  # of another rank, or from a directory
            raw = np.ascontiguousarray(arrays[str(place)])
            one.assign(raw.view(to_numpy(one).dtype).reshape(one.shape))


class KerasState(_VariablesState):
    """The weights of a model, the state of its optimizer, and named values.

    Gradients that an optimizer has accumulated and not yet applied are each rank's own: `restore`
    brings them back, `sync` leaves them as they are, and a directory does not hold them.

    Args:
        model: a Keras model that is built.
        optimizer: the optimizer. Defaults to that of the model.
        directory: as for `ObjectState`.
        **attributes: as for `ObjectState`, such as `epoch=0, batch=0`.

    Raises:
        ArgumentError: the model is not built.
    """

    _described: Any = None  # the optimizers of what is put, while it is

    def __init__(self, model: Any, optimizer: Any = None, directory: Any = None, **attributes: Any):
        from keras_dist.training.model_state import has_weights

        if not has_weights(model):
            expected, received = "a model that is built", f"{model.name!r}, which is not"
            remedy = "Call it on one batch, or its build, before its state is made."
            raise errors.ArgumentError(errors.explain(runtime.where(), expected, received, remedy))
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(directory=directory, **attributes)

    def _variables(self) -> list[Any]:
        from keras_dist.training.built_optimizers import describe, variables_of

        own = [] if self.optimizer is None else self.optimizer.variables
        held = variables_of(self.model, self._described or describe(self.model))
        return list({id(one): one for one in [*held, *own]}.values())

    def _arrays(self) -> dict[str, np.ndarray]:
        from keras_dist.training.built_optimizers import describe

        return {**super()._arrays(), OPTIMIZERS: np.array(json.dumps(describe(self.model)))}

    def _put_arrays(self, arrays: dict[str, np.ndarray], of_file: bool = False) -> None:
        from keras_dist.training import built_optimizers

        self._described = json.loads(str(arrays[OPTIMIZERS])) if OPTIMIZERS in arrays else None
        described = self._described or built_optimizers.describe(self.model)
        built_optimizers.build(self.model, described)
        super()._put_arrays(arrays, of_file)
        self._described = None
        built_optimizers.reset_undescribed(self.model, described)

    def _own(self) -> list[Any]:
        from keras_dist.training.model_state import accumulators, optimizers_inside

        if self.optimizer is None:
            return []
        return accumulators([self.optimizer, *optimizers_inside(self.optimizer)])


class TensorFlowKerasState(KerasState):
    """A `KerasState` with Horovod's arguments.

    Args:
        model: as for `KerasState`, like those that are not named here.
        optimizer: as for `KerasState`.
        backend: ignored, as Keras 3 has one for all models.
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
    """The values of variables of TensorFlow, and named values.

    Args:
        variables: in the same order on every rank. Defaults to `None`: none.
        session: ignored, as there is none since TensorFlow 2.
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

    What has `state_dict` and `load_state_dict` stays the object that it is, and only its state is
    kept. What ranks know to be processed, of an `ElasticSampler`, is put together at each commit
    and `sync`: with a sampler a commit blocks.

    Args:
        model: a module. Defaults to `None`.
        optimizer: an optimizer. Defaults to `None`.
        directory: as for `ObjectState`; each `state_dict` must then be such as
            `torch.load(weights_only=True)` reads.
        **attributes: further modules, optimizers, schedulers and samplers, and values as for
            `ObjectState`.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, directory: Any = None, **attributes: Any
    ):
        self.model, self.optimizer = model, optimizer
        further = [name for name, one in attributes.items() if hasattr(one, "load_state_dict")]
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
                # Not `load_state_dict`: it would share out anew in the middle of an iteration.
                part.processed_indices = set().union(*done)

    def _arrays(self) -> dict[str, np.ndarray]:
        import torch

        found = {}
        for name in self._parts:
            part = getattr(self, name)
            if part is not None:
                file = io.BytesIO()
                torch.save(_with_plain_numbers(part.state_dict()), file)
                found[name] = np.frombuffer(file.getvalue(), np.uint8)
        return found

    def _put_arrays(self, arrays: dict[str, np.ndarray], of_file: bool = False) -> None:
        for name, raw in arrays.items():
            getattr(self, name).load_state_dict(_loaded(raw, of_file))

    def _check(self) -> None:
        if runtime.rank() == 0:  # which writes
            for name, raw in self._kept[1].items():
                _check_part(name, raw)


def _loaded(raw: np.ndarray, of_file: bool) -> Any:
    """Returns a `state_dict`; one from a file executes nothing when it is read."""
    import torch

    # On the root's device it would be in the way there, and there may be none such here.
    return torch.load(io.BytesIO(raw.tobytes()), map_location="cpu", weights_only=of_file)


def _check_part(name: str, raw: np.ndarray) -> None:
    try:
        _loaded(raw, of_file=True)
    except pickle.UnpicklingError as error:
        expected = f"the state_dict of {name} to be what torch.load(weights_only=True) reads, in a "
        remedy = (
            "Keep tensors, numbers, strings and containers of them in it, or allow the class by "
            "torch.serialization.add_safe_globals."
        )
        text = errors.explain(
            runtime.where(), f"{expected}state with a directory", _refused(error), remedy
        )
        raise errors.ArgumentTypeError(text) from error


def _refused(error: pickle.UnpicklingError) -> str:
    """Returns what torch has refused, out of the page that it says about it."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return str(error).partition("\n")[0] if found is None else f"{found[1]} in it"


def _with_plain_numbers(value: Any) -> Any:
    """Returns a `state_dict` with numbers of Python where there are some of numpy.

    A rate that numpy has computed is one, and torch refuses to read it from a file.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple, set):
        return type(value)(_with_plain_numbers(one) for one in value)
    if isinstance(value, dict):
        plain = copy.copy(value)  # with the attributes that torch's have
        plain.clear()
        for key, one in value.items():
            plain[_with_plain_numbers(key)] = _with_plain_numbers(one)
        return plain
    return value
