"""States of models and their optimizers: Keras' on every backend, torch's own."""

import io
from typing import Any

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.elastic.state import ObjectState

__all__ = ["KerasState", "TensorFlowKerasState", "TensorFlowState", "TorchState"]


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
        from keras_dist.model_state import bytes_of

        return {str(place): bytes_of(one) for place, one in enumerate(self._variables())}

    def _put_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        from keras_dist.model_state import to_numpy

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

    def __init__(self, model: Any, optimizer: Any = None, directory: Any = None, **attributes: Any):
        if not model.built:
            expected, received = "a model that is built", f"{model.name!r}, which is not"
            remedy = "Call it on one batch, or its build, before its state is made."
            raise errors.ArgumentError(errors.explain(runtime.where(), expected, received, remedy))
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(directory=directory, **attributes)

    def _variables(self) -> list[Any]:
        from keras_dist.model_state import state

        own = [] if self.optimizer is None else self.optimizer.variables
        return list({id(one): one for one in [*state(self.model), *own]}.values())

    def _own(self) -> list[Any]:
        from keras_dist.model_state import accumulators, optimizers_inside

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
        directory: as for `ObjectState`.
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
                done = _engine.allgather_object(
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
                torch.save(part.state_dict(), file)
                found[name] = np.frombuffer(file.getvalue(), np.uint8)
        return found

    def _put_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        import torch

        for name, raw in arrays.items():
            # `weights_only`: what is read executes nothing. On the root's device it would be in the
            # way there, and there may be none such here.
            file = io.BytesIO(raw.tobytes())
            found = torch.load(file, map_location="cpu", weights_only=True)
            getattr(self, name).load_state_dict(found)
