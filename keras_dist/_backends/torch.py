"""torch: gradients are host arrays already, or are brought there; nothing is traced.

`torch.distributed` is left alone: keras_dist neither starts it nor needs it.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from keras_dist import errors
from keras_dist._backends.torch_overlap import in_train_step, reduce_dense
from keras_dist._backends.torch_tensors import (
    copy_to,
    dtype_of,
    rows_of,
    sparse_of,
    to_numpy,
    to_torch,
)

OnHost = Callable[[np.ndarray], np.ndarray]

__all__ = [
    "add_up_rows",
    "after",
    "as_dense",
    "build_from",
    "check_model",
    "finish_calls",
    "first_batch",
    "limit_threads",
    "multiply",
    "pass_over",
    "pin_device",
    "pull_back",
    "reduce_gradients",
    "through_host",
    "train_step_for_host",
]


def pin_device(local_rank: int, local_size: int) -> str | None:
    """Makes "cuda" mean the GPU of the local rank. See `Backend.pin_device`."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return None
    torch.cuda.set_device(local_rank % gpus)
    if 1 < gpus < local_size:
        return f"shares its GPU: {local_size} ranks on this node, {gpus} GPUs."
    return None


def limit_threads(count: int, override: bool) -> None:
    """Sizes the pool that computes inside an operation. See `Backend.limit_threads`."""
    if override or not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ):
        torch.set_num_threads(count)


def finish_calls() -> None:
    """Does nothing: a program returns when it has called. See `Backend.finish_calls`."""


@torch.compiler.disable
def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    variables: Sequence[Any],
    plan: Callable[[Sequence[int], Sequence[tuple[tuple[int, ...], np.dtype]]], Any],
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
        for i, array in zip(dense, results, strict=True):
            reduced[i] = to_torch(array, gradients[i])
    for i in backwards:
        if i not in reduced:
            slices = gradients[i].coalesce()
            rows, places = reduce_slices(names[i], *rows_of(slices))
            reduced[i] = sparse_of(rows, places, slices)
    return [reduced[i] for i in range(len(gradients))]


@torch.compiler.disable
def through_host(tensor: Any, forward: OnHost, backward: OnHost) -> Any:
    """Calls the host, for the gradient too. See `Backend.through_host`."""
    if tensor.is_meta:  # Keras asks for shapes alone
        return torch.empty_like(tensor)
    return _ThroughHost.apply(tensor, forward, backward)


class _ThroughHost(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Any, forward: Any, backward: Any) -> Any:
        context.on_host = backward
        return to_torch(forward(to_numpy(tensor)), tensor)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return to_torch(context.on_host(to_numpy(gradient)), gradient), None, None


def after(earlier: Any, tensors: Sequence[Any]) -> list[Any]:
    """Does nothing: the host is called in the order of the program. See `Backend.after`."""
    return list(tensors)


def pull_back(
    model: Any, inputs: np.ndarray, loss: Callable[[Any], Any] | None, through: bool
) -> tuple[np.ndarray, Callable[[np.ndarray, float], tuple[list[Any], np.ndarray | None]]]:
    """Keeps torch's own graph. See `Backend.pull_back`."""
    weights = [variable.value for variable in model.trainable_variables]
    place = weights[0].device if weights else torch.get_default_device()
    given = copy_to(place, inputs).requires_grad_(through)
    outputs = model(given, training=True)
    result = outputs if loss is None else loss(outputs)
    penalties = model.losses

    def back(gradient: np.ndarray, factor: float) -> tuple[list[Any], np.ndarray | None]:
        sources = [*weights, *([given] if through else [])]
        factors = [torch.full_like(penalty, factor) for penalty in penalties]
        dense = _gradients([result, *penalties], sources, [to_torch(gradient, result), *factors])
        return dense[: len(weights)], to_numpy(dense[-1]) if through else None

    return to_numpy(result), back


def _gradients(
    results: Sequence[Any], sources: Sequence[Any], gradients: Sequence[Any]
) -> list[Any]:
    """Returns what `torch.autograd.grad` does; zeros where it would refuse, dense ones."""
    pairs = zip(results, gradients, strict=True)
    known = [(result, gradient) for result, gradient in pairs if result.requires_grad]
    if not known or not sources:
        return [torch.zeros_like(source) for source in sources]
    roots, of_roots = zip(*known, strict=True)
    found = torch.autograd.grad(roots, sources, of_roots, allow_unused=True, materialize_grads=True)
    return as_dense(found)


def add_up_rows(gradients: Sequence[Any]) -> list[Any]:
    """Adds up rows of equal index. See `Backend.add_up_rows`."""
    return [g.coalesce() if g.is_sparse else g for g in gradients]


def as_dense(gradients: Sequence[Any]) -> list[Any]:
    """Makes sparse gradients dense. See `Backend.as_dense`."""
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]


def multiply(gradients: Sequence[Any], factor: float) -> list[Any]:
    """Multiplies gradients, sparse ones too, by a number. See `Backend.multiply`."""
    return [gradient * factor for gradient in gradients]


def pass_over(count: int, logs: dict[str, Any], batches: Any) -> dict[str, Any]:
    """Does nothing: Keras has taken the batches. See `Backend.pass_over`."""
    return logs


def first_batch(count: int, batches: Any) -> tuple[Any, tuple[Any, ...]]:
    """Looks at the list that Keras has made. See `Backend.first_batch`."""
    return (batches[0] if isinstance(batches, list) and batches else None), (batches,)


def build_from(model: Any, batches: Any) -> None:
    """Does nothing: Keras builds a model of this backend before `fit` calls callbacks."""


def check_model(model: Any) -> None:
    """Refuses a model whose gradients torch averages itself. See `Backend.check_model`."""
    from keras_dist._compat.keras.models import layers_of, may_become_ddp

    expected = f"a model whose gradients keras_dist alone averages, {model.name!r}"
    # Keras does not tell torch of the layers in its lists.
    modules = (module for layer in layers_of(model) for module in layer.modules())
    if any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in modules):
        raise errors.ArgumentError(
            errors.explain(
                "[keras_dist]",
                expected,
                "torch's DistributedDataParallel in it",
                "Leave out either it (and keras.distribution) or keras_dist.DistributedOptimizer.",
            )
        )
    if may_become_ddp(model) and _has_process_group():
        raise errors.BackendError(
            errors.explain(
                "[keras_dist]",
                expected,
                "torch.distributed initialised, for which this version of Keras wraps the "
                "model in DistributedDataParallel (ddp_model)",
                "Leave out either torch.distributed (and keras.distribution) or "
                "keras_dist.DistributedOptimizer.",
            )
        )


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextlib.contextmanager
def train_step_for_host(model: Any) -> Iterator[None]:
    """Lets the step reduce on the way. See `Backend.train_step_for_host`."""
    before = model.train_function
    yield
    made = model.train_function
    if made is not before:
        model.train_function = functools.wraps(made)(in_train_step()(made))
