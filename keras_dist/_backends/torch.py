"""The torch backend: the engine reads gradients where they are, on the host or in GPU memory.

keras_dist neither initialises nor uses `torch.distributed`.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from keras_dist import errors
from keras_dist._backends.torch_device import (
    engine_arrays,
    gpu_number,
    is_on_device,
    reduce_on_device,
    tensor_of,
    to_array,
    to_tensor,
    to_tensors,
)
from keras_dist._backends.torch_overlap import in_train_step, reduce_dense
from keras_dist._backends.torch_tensors import (
    dtype_of,
    form_of,
    rows_of,
    sparse_of,
    to_numpy,
    to_torch,
    zeros_of,
)

HostFunction = Callable[[np.ndarray], np.ndarray]

__all__ = [
    "after",
    "as_dense",
    "as_tensors",
    "build_from",
    "call_host",
    "call_uncompiled",
    "check_model",
    "coalesce",
    "differentiable_host_callback",
    "engine_arrays",
    "finish_calls",
    "first_batch",
    "form_of",
    "gpu_number",
    "host_array",
    "is_traced",
    "limit_threads",
    "multiply",
    "pin_device",
    "reduce_gradients",
    "skip_batches",
    "tensor_of",
    "test_step_for_host",
    "train_step_for_host",
    "zeros",
]


def pin_device(local_rank: int, local_size: int) -> str | None:
    """Makes the GPU of the local rank the default CUDA device. See `Backend.pin_device`."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return None
    torch.cuda.set_device(local_rank % gpus)
    if 1 < gpus < local_size:
        return f"shares its GPU: {local_size} ranks on this node, {gpus} GPUs."
    return None


def limit_threads(count: int, override: bool) -> None:
    """Sets the size of the intra-op pool. See `Backend.limit_threads`."""
    if override or not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ):
        torch.set_num_threads(count)


def finish_calls() -> None:
    """Does nothing: an operation returns after its host calls. See `Backend.finish_calls`."""


def host_array(tensor: Any) -> np.ndarray:
    """See `Backend`."""
    return to_numpy(tensor)


@torch.compiler.disable
def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    variables: Sequence[Any],
    plan: Callable[..., Any],
    reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
    when: Any = None,
) -> list[Any]:
    """Reduces dense gradients by bucket and sparse ones by rows, last gradient first.

    See `Backend.reduce_gradients`.
    """
    reduced: dict[int, torch.Tensor] = {}
    backwards = range(len(gradients) - 1, -1, -1)
    dense = [i for i in backwards if not gradients[i].is_sparse]
    if dense:
        fused = plan(dense, [(tuple(gradients[i].shape), dtype_of(gradients[i])) for i in dense])
        parameters = [variables[i].value for i in dense]
        results = reduce_dense(fused, parameters, [gradients[i] for i in dense])
        tensors = to_tensors(results, [gradients[i] for i in dense])
        reduced.update(zip(dense, tensors, strict=True))
    for i in backwards:
        if i not in reduced:
            slices = gradients[i].coalesce()
            if is_on_device(slices.values()):
                reduced[i] = reduce_on_device(functools.partial(reduce_slices, names[i]), slices)
                continue
            rows, indices = reduce_slices(names[i], *rows_of(slices))
            reduced[i] = sparse_of(rows, indices, slices)
    return [reduced[i] for i in range(len(gradients))]


def zeros(variable: Any, form: tuple[str, str | None]) -> Any:
    """See `Backend`."""
    return zeros_of(variable.value, form)


def is_traced(gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
    """Returns `False`. See `Backend`."""
    return False


@torch.compiler.disable
def call_uncompiled(function: Callable[[], Any]) -> Any:
    """See `Backend`."""
    return function()


@torch.compiler.disable
def differentiable_host_callback(
    tensor: Any, forward: HostFunction, backward: HostFunction, on_device: bool = False
) -> Any:
    """Calls the host, with a gradient. See `Backend.differentiable_host_callback`."""
    if tensor.is_meta:  # Keras infers shapes
        return torch.empty_like(tensor)
    take = to_array if on_device else to_numpy
    return _HostCallback.apply(tensor, forward, backward, take)


class _HostCallback(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Any, forward: Any, backward: Any, take: Any) -> Any:
        context.on_host, context.take = backward, take
        return to_tensor(forward(take(tensor)), tensor)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        result = context.on_host(context.take(gradient))
        return to_tensor(result, gradient), None, None, None


@torch.compiler.disable
def call_host(
    function: Callable[..., Sequence[np.ndarray]],
    tensors: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
) -> list[Any]:
    """Calls the host. See `Backend.call_host`."""
    results = function(*[to_numpy(tensor) for tensor in tensors])
    return [to_torch(result, tensor) for result, tensor in zip(results, tensors, strict=True)]


def after(earlier: Any, tensors: Sequence[Any]) -> list[Any]:
    """Returns the tensors: the host is called in program order. See `Backend.after`."""
    return list(tensors)


def coalesce(gradients: Sequence[Any]) -> list[Any]:
    """Sums the rows of equal index. See `Backend.coalesce`."""
    return [g.coalesce() if g.is_sparse else g for g in gradients]


def as_dense(gradients: Sequence[Any]) -> list[Any]:
    """Makes sparse gradients dense. See `Backend.as_dense`."""
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]


def as_tensors(gradients: Sequence[Any]) -> list[Any]:
    """See `Backend`."""
    from keras import ops

    return [
        gradient
        if gradient is None or isinstance(gradient, torch.Tensor)
        else ops.convert_to_tensor(gradient)
        for gradient in gradients
    ]


def multiply(gradients: Sequence[Any], factor: float) -> list[Any]:
    """Multiplies gradients, including sparse ones, by a number. See `Backend.multiply`."""
    return [gradient * factor for gradient in gradients]


def skip_batches(count: int, logs: dict[str, Any], batches: Any) -> dict[str, Any]:
    """Returns the logs: Keras has taken the batches. See `Backend.skip_batches`."""
    return logs


def first_batch(count: int, batches: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the first batch of Keras' list. See `Backend.first_batch`."""
    return (batches[0] if isinstance(batches, list) and batches else None), (batches,)


def build_from(model: Any, batches: Any) -> None:
    """Does nothing: on torch, Keras builds a model before `fit` calls callbacks."""


def check_model(model: Any) -> None:
    """Refuses a model whose gradients torch averages. See `Backend.check_model`."""
    from keras_dist._compat.keras.models import layers_of, may_become_ddp

    expected = f"a model whose gradients keras_dist alone averages, {model.name!r}"
    # Keras does not register the layers in its lists with torch.
    modules = (module for layer in layers_of(model) for module in layer.modules())
    if any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in modules):
        raise errors.ArgumentError(
            "[keras_dist]",
            expected,
            "a model with torch's DistributedDataParallel in it",
            "Remove either DistributedDataParallel (and keras.distribution) or "
            "keras_dist.DistributedOptimizer.",
        )
    if may_become_ddp(model) and _has_process_group():
        raise errors.BackendError(
            "[keras_dist]",
            expected,
            "torch.distributed initialised, so that this version of Keras wraps the model in "
            "DistributedDataParallel (ddp_model)",
            "Remove either torch.distributed (and keras.distribution) or "
            "keras_dist.DistributedOptimizer.",
        )


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextlib.contextmanager
def train_step_for_host(model: Any, with_rows: Callable[..., Any]) -> Iterator[Any]:
    """Enables overlap in the step. See `Backend.train_step_for_host`."""
    yield in_train_step


def test_step_for_host(model: Any) -> contextlib.AbstractContextManager[None]:
    """Does nothing: a compiled step may call the host. See `Backend.test_step_for_host`."""
    return contextlib.nullcontext()
