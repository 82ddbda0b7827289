"""The torch backend, without `torch.distributed`: the engine reads gradients where they are."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from keras_dist import errors
from keras_dist._backends import Backend, HostFunction, OfTensor
from keras_dist._backends.torch_overlap import in_train_step, reduce_dense
from keras_dist._backends.torch_rows import embeddings_by_rows, may_be_sparse, table_of
from keras_dist._backends.torch_tensors import (
    differentiable,
    dtype_of,
    form_of,
    is_on_device,
    reduce_on_device,
    rows_of,
    sparse_of,
    to_array,
    to_numpy,
    to_tensor,
    to_tensors,
    to_torch,
    zeros_of,
)
from keras_dist._gpu import counts_host_memory, uniform


@contextlib.contextmanager
def _in_step(model: Any) -> Iterator[None]:
    with in_train_step(), embeddings_by_rows(model):
        yield


class Torch(Backend):
    """torch."""

    name = "torch"
    host_array = staticmethod(to_numpy)
    tensor_of = staticmethod(to_tensor)
    form_of = staticmethod(form_of)
    differentiable_host_callback = torch.compiler.disable(Backend.differentiable_host_callback)
    call_uncompiled = torch.compiler.disable(Backend.call_uncompiled)
    between_steps = torch.no_grad()(Backend.between_steps)

    def pin_device(self, local_rank: int, local_size: int) -> str | None:
        gpus = torch.cuda.device_count()
        if gpus == 0:
            return None
        torch.cuda.set_device(local_rank % gpus)
        if 1 < gpus < local_size:
            return f"shares its GPU: {local_size} ranks on this node, {gpus} GPUs."
        return None

    def gpu_number(self) -> int | None:
        if counts_host_memory():
            return 0
        return torch.cuda.current_device() if torch.cuda.is_available() else None

    def limit_threads(self, count: int, override: bool) -> None:
        if override or not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ):
            torch.set_num_threads(count)

    def engine_arrays(self, tensors: Sequence[Any]) -> list[Any]:
        return uniform([to_array(tensor) for tensor in tensors])

    @torch.compiler.disable
    def reduce_gradients(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        variables: Sequence[Any],
        plan: Callable[..., Any],
        reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
        when: Any = None,
    ) -> list[Any]:
        reduced: dict[int, torch.Tensor] = {}
        backwards = range(len(gradients) - 1, -1, -1)
        dense = [i for i in backwards if not gradients[i].is_sparse]
        if dense:
            fused = plan(
                dense, [(tuple(gradients[i].shape), dtype_of(gradients[i])) for i in dense]
            )
            parameters = [variables[i].value for i in dense]
            results = reduce_dense(fused, parameters, [gradients[i] for i in dense])
            tensors = to_tensors(results, [gradients[i] for i in dense])
            reduced.update(zip(dense, tensors, strict=True))
        for i in backwards:
            if i not in reduced:
                slices = gradients[i].coalesce()
                if is_on_device(slices.values()):
                    reduced[i] = reduce_on_device(
                        functools.partial(reduce_slices, names[i]), slices
                    )
                    continue
                rows, indices = reduce_slices(names[i], *rows_of(slices))
                table = table_of(variables[i].value)
                if table is not None:
                    # What reads the gradient after the step finds that of plain Keras.
                    reduced[i] = variables[i].value.grad = table.filled(rows, indices)
                else:
                    reduced[i] = sparse_of(rows, indices, slices)
        return [reduced[i] for i in range(len(gradients))]

    def as_tensors(self, gradients: Sequence[Any]) -> list[Any]:
        from keras import ops

        return [
            gradient
            if gradient is None or isinstance(gradient, torch.Tensor)
            else ops.convert_to_tensor(gradient)
            for gradient in gradients
        ]

    def zeros(self, variable: Any, form: tuple[str, str | None]) -> Any:
        return zeros_of(variable.value, form)

    def differentiable(self, run: OfTensor, back: OfTensor, given: Any) -> Any:
        return differentiable(lambda one: (run(one),), lambda one: (back(one),), given)[0]

    def run_on_host(self, function: HostFunction, tensor: Any, on_device: bool) -> Any:
        if tensor.is_meta:  # Keras infers shapes
            return torch.empty_like(tensor)
        take: Any = to_array if on_device else to_numpy
        return to_tensor(function(take(tensor)), tensor)

    @torch.compiler.disable
    def call_host(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        tensors: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        results = function(*[to_numpy(tensor) for tensor in tensors])
        return [to_torch(result, tensor) for result, tensor in zip(results, tensors, strict=True)]

    def coalesce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        # Keras expects a table where the train step has made rows of it.
        dense = [
            gradient.to_dense() if table_of(variable.value) is not None else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        return [gradient.coalesce() if gradient.is_sparse else gradient for gradient in dense]

    def as_dense(self, gradients: Sequence[Any]) -> list[Any]:
        return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]

    def check_model(self, model: Any) -> None:
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
        process_groups = torch.distributed
        is_initialized = process_groups.is_available() and process_groups.is_initialized()
        if may_become_ddp(model) and is_initialized:
            raise errors.BackendError(
                "[keras_dist]",
                expected,
                "torch.distributed initialised, so that this version of Keras wraps the model in "
                "DistributedDataParallel (ddp_model)",
                "Remove either torch.distributed (and keras.distribution) or "
                "keras_dist.DistributedOptimizer.",
            )

    @contextlib.contextmanager
    def train_step_for_host(
        self, model: Any, with_rows: Callable[..., Any], takes_rows: bool
    ) -> Iterator[Any]:
        by_rows = takes_rows and may_be_sparse(model)
        yield functools.partial(_in_step, model) if by_rows else in_train_step

    def skip_batches(self, count: int, logs: dict[str, Any], *arguments: Any) -> dict[str, Any]:
        """Returns the logs: Keras has taken the batches."""
        return logs

    def first_batch(self, count: int, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        [batches] = arguments
        return (batches[0] if isinstance(batches, list) and batches else None), (batches,)


backend = Torch()
