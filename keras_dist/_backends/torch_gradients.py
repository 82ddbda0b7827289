"""Takes gradients from backpropagation on torch as they are produced, so that they are freed."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_dist import errors
from keras_dist._backends.torch_overlap import optimizer_of_step
from keras_dist._compat.torch import weak_tensor_keys


@functools.cache
def _hooks() -> Any:
    """Returns the hook of each parameter whose gradients are taken."""
    return weak_tensor_keys()


def take_gradients(
    optimizer: Any, variables: Sequence[Any], receive: Callable[[Any, Any], None]
) -> None:
    """Passes gradients on and frees them. See `keras_dist._backends.take_gradients`."""
    away = [variable.path for variable in variables if not variable.value.is_cpu]
    if away:
        raise errors.ArgumentError(
            "[keras_dist]",
            "variables in host memory, with shard_gradients=True",
            f"{away[0]} on a device",
            "Omit shard_gradients.",
        )
    method = weakref.WeakMethod(receive)  # parameters outlive an optimizer
    owner = weakref.ref(optimizer)
    for variable in variables:
        parameter = variable.value
        if parameter in _hooks():
            _hooks()[parameter].remove()  # that of an earlier optimizer
        take = functools.partial(_take, owner, method, weakref.ref(variable))
        _hooks()[parameter] = parameter.register_post_accumulate_grad_hook(take)


def _take(owner: Any, method: Any, variable_of: Any, parameter: torch.Tensor) -> None:
    optimizer, receive, variable = owner(), method(), variable_of()
    if receive is None or variable is None or parameter.grad is None:
        return
    if optimizer is None or optimizer is not optimizer_of_step():
        return  # the update takes whole gradients
    gradient, parameter.grad = parameter.grad, None
    receive(variable, gradient.to_dense() if gradient.is_sparse else gradient)
