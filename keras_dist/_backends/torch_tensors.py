"""Torch tensors as arrays, and back: of numpy, or for the engine also where they are on a GPU."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.forward_ad import unpack_dual

from keras_dist import errors
from keras_dist._compat.torch import copy_all
from keras_dist._gpu import Concatenation, DeviceArray, counts_host_memory, load_runtime


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, back: Any, *tensors: torch.Tensor) -> Any:
        return run(*tensors)

    @staticmethod  # apart from `forward`, as `torch.func` requires
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        context.back = inputs[1]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *context.back(*gradients)


def differentiable(
    run: Callable[..., tuple[torch.Tensor, ...]],
    back: Callable[..., Sequence[torch.Tensor]],
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Runs a function of tensors whose gradient is another one, of the gradients of its results."""
    # Autograd, which is slow for many small tensors, takes part only if it records.
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        for tensor in tensors:  # within a function of autograd, tangents are hidden
            _check_no_tangent(tensor)
        return _Function.apply(run, back, *tensors)
    return run(*tensors)


def dtype_of(tensor: torch.Tensor) -> np.dtype:
    """Returns the dtype of the array of a tensor."""
    return _numpy_dtype(tensor.dtype)


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return to_numpy(torch.empty(0, dtype=dtype)).dtype


def form_of(gradient: torch.Tensor) -> tuple[str, str | None]:
    """Returns the dtype of a gradient, and that of its indices if it is sparse."""
    return str(gradient.dtype).removeprefix("torch."), "int64" if gradient.is_sparse else None


def zeros_of(parameter: torch.Tensor, form: tuple[str, str | None]) -> torch.Tensor:
    """Returns a gradient of zeros for a parameter; a sparse one has no rows."""
    shape, dtype, device = parameter.shape, getattr(torch, form[0]), parameter.device
    if form[1] is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    rows = torch.zeros((0, *shape[1:]), dtype=dtype, device=device)
    indices = torch.zeros((1, 0), dtype=torch.int64, device=device)
    return torch.sparse_coo_tensor(indices, rows, shape, is_coalesced=True)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor as an array: a view of a contiguous CPU tensor, otherwise a copy."""
    _check_no_tangent(tensor)
    host = tensor.detach() if tensor.requires_grad else tensor
    try:
        if not host.is_cpu:
            host = _to_host(host)
        if not host.is_contiguous():
            host = host.contiguous()
        if host.dtype is torch.bfloat16:
            import ml_dtypes  # numpy has no bfloat16

            return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return host.numpy()
    except (RuntimeError, TypeError):
        return _resolved(host)


def to_torch(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Returns an array as a tensor of the dtype and device of `like`: a view on the CPU."""
    if array.dtype.isbuiltin == 2:  # of an extension, such as bfloat16
        tensor = torch.from_numpy(array.view(f"i{array.itemsize}")).view(like.dtype)
    else:
        tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def write_into(tensor: torch.Tensor, array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Writes an array or a tensor into a tensor, without autograd, and returns the latter."""
    # A tensor of `torch.inference_mode` may be written to in that mode alone, which is of a thread.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        return tensor.copy_(array if isinstance(array, torch.Tensor) else to_torch(array, tensor))


def write_all(tensors: Sequence[torch.Tensor], values: Sequence[np.ndarray | torch.Tensor]) -> None:
    """Writes arrays or tensors into tensors, without autograd: several of a GPU at once."""
    given = [
        value if isinstance(value, torch.Tensor) else to_torch(value, tensor)
        for tensor, value in zip(tensors, values, strict=True)
    ]
    if len(tensors) > 1 and all(tensor.is_cuda for tensor in (*tensors, *given)):
        copy_all(list(tensors), given)
        return
    for tensor, value in zip(tensors, given, strict=True):
        write_into(tensor, value)


def rows_of(tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of a coalesced sparse tensor, with the row-major index of each."""
    values, indices = to_numpy(tensor.values()), to_numpy(tensor.indices())
    shape = tensor.shape[: tensor.sparse_dim()]
    flat = indices[0] if len(shape) == 1 else np.ravel_multi_index(tuple(indices), shape)
    return values, flat


def sparse_of(rows: np.ndarray, indices: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Returns the sparse tensor, like `like`, of values and ascending indices from `rows_of`."""
    shape = like.shape[: like.sparse_dim()]
    full = indices[None] if len(shape) == 1 else np.stack(np.unravel_index(indices, shape))
    return torch.sparse_coo_tensor(
        to_torch(full, like.indices()),
        to_torch(rows, like.values()),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _check_no_tangent(tensor: torch.Tensor) -> None:
    """Refuses a tensor with a forward-mode derivative, which an array would lose."""
    if unpack_dual(tensor).tangent is not None:
        raise errors.ArgumentError(
            "[keras_dist]",
            "a tensor without a forward-mode derivative",
            "one with a tangent, as torch.autograd.forward_ad and torch.func.jvp make them",
            "Use backward, torch.autograd.grad or torch.func.vjp, or detach the tensor.",
        )


def _resolved(host: torch.Tensor) -> np.ndarray:
    """Returns a conjugate or negative view, or a float8 tensor, as an array."""
    import ml_dtypes

    name = str(host.dtype).removeprefix("torch.")
    try:
        host = host.resolve_conj().resolve_neg()
        if name.startswith("float8_") and hasattr(ml_dtypes, name):
            return host.view(torch.uint8).numpy().view(getattr(ml_dtypes, name))
        return host.numpy()
    except (RuntimeError, TypeError) as error:
        raise errors.ArgumentTypeError(
            "[keras_dist]",
            "a dense tensor of a dtype that numpy can hold",
            f"a tensor of {host.dtype} with layout {host.layout} on {host.device}",
            "Convert it first, for example by to(torch.float32), to_dense() or dequantize(). In "
            "torch.vmap, and so in torch.func.jacrev, tensors have no values that numpy can read.",
        ) from error


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    # The GPU writes to pinned memory directly; for other memory the driver makes a second copy.
    staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return staging.copy_(tensor)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Returns whether the engine takes a tensor as an array in GPU memory."""
    if tensor.is_cuda:
        runtime = load_runtime()
        return runtime is not None and runtime.device == tensor.device.index
    return tensor.is_cpu and counts_host_memory()


def to_array(tensor: torch.Tensor) -> np.ndarray | DeviceArray:
    """Returns a tensor as an array of the engine; only one that is not contiguous is copied."""
    if not is_on_device(tensor):
        return to_numpy(tensor)
    if tensor.layout is not torch.strided:
        return to_numpy(tensor)  # which refuses it
    _check_no_tangent(tensor)
    return _device_array(tensor.detach().contiguous().resolve_conj().resolve_neg())


def to_tensor(array: np.ndarray | DeviceArray, like: torch.Tensor) -> torch.Tensor:
    """Returns an array as a tensor like another, whose stream waits until it has been written."""
    if not isinstance(array, DeviceArray):
        return to_torch(array, like)
    return array.finish(_stream_of(like))


def to_tensors(arrays: Sequence[Any], likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns arrays as `to_tensor` does; the stream waits once for what one operation writes."""
    held: set[int] = set()
    found = []
    for array, like in zip(arrays, likes, strict=True):
        if isinstance(array, DeviceArray) and id(array.completion) in held:
            found.append(array.owner)
            continue
        if isinstance(array, DeviceArray):
            held.add(id(array.completion))
        found.append(to_tensor(array, like))
    return found


def reduce_on_device(reduce_slices: Any, sparse: torch.Tensor) -> torch.Tensor:
    """Reduces a coalesced sparse tensor in GPU memory; see `Backend.reduce_gradients`."""
    shape = sparse.shape[: sparse.sparse_dim()]
    indices, values = sparse.indices(), sparse.values()
    flat = indices[0]
    for index, length in zip(indices[1:], shape[1:], strict=True):
        flat = flat * length + index
    rows, numbers, count = reduce_slices(to_array(values), to_array(flat))
    full = torch.stack(torch.unravel_index(to_tensor(numbers, flat), shape))
    total = torch.sparse_coo_tensor(full, to_tensor(rows, values), sparse.shape).coalesce()
    return total / count if count > 1 else total


def _device_array(tensor: torch.Tensor) -> DeviceArray:
    def allocate(shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        return _device_array(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))

    return DeviceArray(
        tensor.data_ptr(),
        tuple(tensor.shape),
        dtype_of(tensor),
        tensor,
        allocate,
        lambda: _stream_of(tensor),
        joiner=_JOINER,
    )


def _join(arrays: Sequence[DeviceArray], offsets: Sequence[int], count: int) -> DeviceArray:
    tensors = [array.owner for array in arrays]
    flat = torch.empty(count, dtype=tensors[0].dtype, device=tensors[0].device)
    places = [_place(flat, at, t.shape) for at, t in zip(offsets, tensors, strict=True)]
    write_all(places, tensors)
    return _device_array(flat)


def _part(flat: DeviceArray, offset: int, shape: tuple[int, ...]) -> DeviceArray:
    return _device_array(_place(flat.owner, offset, shape))


def _place(flat: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    return flat.narrow(0, offset, math.prod(shape)).view(shape)


_JOINER = Concatenation(_join, _part)


def _stream_of(tensor: torch.Tensor) -> Any:
    """Returns the current stream; 0, the program itself, for a tensor on the CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
