"""Conversion between torch tensors and numpy arrays. Only tensors on a device are copied."""

import functools
from collections.abc import Sequence

import numpy as np
import torch

from keras_dist import errors
from keras_dist._compat.torch import copy_all


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
    with torch.no_grad():
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
    """Returns the values of a coalesced sparse tensor, and an index for each.

    Several sparse dimensions are flattened in row-major order.
    """
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
            "Convert it first, for example by to(torch.float32), to_dense() or dequantize().",
        ) from error


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    # The GPU writes to pinned memory directly; for other memory the driver makes a second copy.
    staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return staging.copy_(tensor)
