"""The assignment of the gradients of torch parameters to a reduction plan."""

from collections.abc import Sequence
from typing import Any

import torch

from keras_dist import _engine
from keras_dist._backends import torch_overlap


class Layout:
    """The indices of gradients in a plan."""

    def __init__(
        self,
        plan: _engine.FusedAllreduce,
        parameters: Sequence[torch.Tensor],
        brought: _engine.GradientSet,
    ):
        self.plan, self.brought = plan, brought
        self._specs = [_spec(parameter) for parameter in parameters]
        self._indices = {id(parameter): index for index, parameter in enumerate(parameters)}

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Returns whether the gradients of parameters are those of the plan."""
        return self._specs == [_spec(parameter) for parameter in parameters]

    def index_of(self, parameter: torch.Tensor) -> int | None:
        """Returns the index of a gradient; `None` if it is new or its shape or dtype differs."""
        index = self._indices.get(id(parameter))
        return index if index is None or self._specs[index] == _spec(parameter) else None


def _spec(parameter: torch.Tensor) -> Any:
    gradient: Any = parameter.grad
    return id(parameter), gradient.shape, gradient.dtype, gradient.is_sparse


def version_of(parameter: torch.Tensor) -> Any:
    """Returns a value that changes if the gradient of a parameter is replaced or written to."""
    gradient: Any = parameter.grad
    # A sparse gradient is copied when it is ready, so later writes do not matter.
    return None if gradient.is_sparse else torch_overlap.version_of(gradient)
